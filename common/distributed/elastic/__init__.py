"""Elastic runs: coordinator, members, process groups of a generation, and supervisor."""
