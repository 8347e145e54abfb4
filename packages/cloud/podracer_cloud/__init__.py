"""Mirrors of runs and tournaments in object stores, with leases."""
