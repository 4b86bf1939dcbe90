"""Elastic runs: coordinator, members, process groups of a generation, supervisor, and recovery of a step."""
