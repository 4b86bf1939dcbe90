"""Faults that strike a run of local_sgd between two exchanges."""

from __future__ import annotations

from tests.cluster.fault_kinds import Fault, kill_any, requeue, signal_job

FAULTS = (
    Fault("kill -9 of a worker between exchanges", kill_any, only="local_sgd"),
    Fault("USR2 between exchanges", signal_job, notice=True, only="local_sgd"),
    Fault("requeue between exchanges", requeue, notice=True, only="local_sgd"),
)
