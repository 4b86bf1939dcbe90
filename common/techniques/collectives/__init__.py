"""Benchmark of collective operations: measurements and report.

`measurement` defines the operations, points and variants of the benchmark, and `report.CollectiveReport` formats the
times. The collectives of the built-in backend are implemented in `common.backend`; this package measures them and
torch's backends.
"""
