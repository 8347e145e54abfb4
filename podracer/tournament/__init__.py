"""Tournaments: pods that train, submit to a leaderboard, and restart from its best entries."""
