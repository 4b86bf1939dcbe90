"""Elastic runs (`elastic=true`), which continue after losing a rank.

`coordinator` and `supervisor` run in the launcher; `supervisor.open_local_supervisor` starts both for local ranks.
`member` connects a rank to the coordinator, `group` forms the process group of a generation, and
`recovery.ElasticRecovery` is the hook with which a rank repeats a failed step. configs/dataparallel.py names both entry
points, so that other runs do not import this package. In a SLURM job, `slurm.scheduling.elastic_launcher` is the
launcher.
"""
