"""Tournaments: pods that train, submit to a leaderboard, and start again from it."""
