"""Commands that start work: exp, rerun, sweep, tour, new-experiment and check-optimizer."""
