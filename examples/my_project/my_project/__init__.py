"""An environment and an agent for podracer."""
