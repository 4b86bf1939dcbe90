"""Benchmark of collective operations: measurements and report."""
