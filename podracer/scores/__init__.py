"""Scores of runs and of seeds, from their records."""
