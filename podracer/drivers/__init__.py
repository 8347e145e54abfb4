"""Drivers, which run an agent in environments on devices: Anakin, Sebulba and populations."""
