"""Environments of suites in JAX, and games whose agents learn one policy."""
