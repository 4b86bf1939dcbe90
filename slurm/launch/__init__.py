"""Implementations of the verbs exp, rerun, sweep, tour, new-experiment, and check-optimizer."""
