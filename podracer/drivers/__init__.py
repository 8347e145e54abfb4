"""The architectures: what runs an agent in environments on a mesh of devices."""
