pytest_plugins = ["podracer.testing.plugin"]
