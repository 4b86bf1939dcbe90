"""Submission of jobs through Submitit, the job script, requeueing, and calls of SLURM commands."""
