"""Elastic runs: coordinator, members, process groups of generations, and supervisor."""
