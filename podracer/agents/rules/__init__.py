"""Agents that learn update rules, and students that learn by a rule."""
