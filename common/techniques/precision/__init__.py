"""Report on mixed precision and gradient accumulation (`report.PrecisionReport`).

Autocast, gradient scaling and accumulation are the method, and are in experiments/amp_accum.py.
"""
