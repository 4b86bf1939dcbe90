"""A real SLURM cluster on one machine, with one network namespace per host."""
