"""SLURM: fake commands, and a real cluster."""
