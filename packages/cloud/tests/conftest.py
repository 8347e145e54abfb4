pytest_plugins = ["podracer_testing.plugin", "fault_matrix"]
