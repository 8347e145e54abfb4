"""Environments of the host, stepped by native threads or worker processes."""
