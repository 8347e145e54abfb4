"""Parts of agents with continuous actions."""
