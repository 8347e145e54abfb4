pytest_plugins = ["podracer.testing.plugin", "fault_matrix"]
