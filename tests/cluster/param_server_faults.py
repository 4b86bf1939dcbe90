"""Faults that only a run of param_server can suffer."""

from __future__ import annotations

from tests.cluster.fault_kinds import Fault, kill

FAULTS = (Fault("kill -9 of a server", kill(1), only="param_server"),)
