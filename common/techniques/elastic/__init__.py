"""Elastic runs: coordinator, members, process group of each generation, supervisor, and recovery."""
