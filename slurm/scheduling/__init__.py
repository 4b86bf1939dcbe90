"""Jobs: submission through Submitit, the job script, requeueing, and calls of SLURM's commands."""
