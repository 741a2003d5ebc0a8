"""Parallelism as data: wrappers, placements, process groups and devices."""
