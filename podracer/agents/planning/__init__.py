"""Parts of agents that plan."""
