"""Tests of the contracts as functions, and the setup of pytest that they need.

A `conftest.py` begins with `pytest_plugins = ["podracer_testing.plugin"]`.
"""
