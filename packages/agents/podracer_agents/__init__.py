"""Agents of papers beside the core's, see the README."""
