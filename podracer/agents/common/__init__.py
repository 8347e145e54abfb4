"""Shared parts of agents."""
