"""Mistakes that tests/pitfalls plants in real processes."""
