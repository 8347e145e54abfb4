"""Configuration of a run: what is trained, as data."""
