"""Throughput of both architectures, and the search for the fastest settings."""
