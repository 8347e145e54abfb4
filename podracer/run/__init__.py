"""A run: set up, trained, saved, resumed."""
