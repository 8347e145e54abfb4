"""Experiments: configurations, recipes, and the run that trains one."""
