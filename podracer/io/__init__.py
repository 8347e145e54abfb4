"""Durable storage of a run (directories, checkpoints, metrics), and signals."""
