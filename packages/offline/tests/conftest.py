pytest_plugins = ["podracer_testing.plugin"]
