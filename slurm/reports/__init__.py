"""Commands that report on runs: status, logs, compare, doctor, evaluate, export, sync and prune-runs."""
