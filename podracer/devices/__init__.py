"""Devices, processes and memory of a run, and reductions over them."""
