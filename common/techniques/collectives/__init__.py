"""Measurements of collective operations, and their report."""
