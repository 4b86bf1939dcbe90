"""Package that launches and schedules runs, reports on them, and provides a local SLURM cluster."""
