"""LPG: an update rule that is learned, and agents that learn by one."""
