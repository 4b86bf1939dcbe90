"""Checks of the memory, the limits and the CPU cores of this host before training starts."""

from __future__ import annotations

from common.runs import provenance
from common.system import host_memory, process_limits
from common.system.errors import UserError
from common.system.processes import count_host_cores
from common.system.text import format_count
from configs.shared import Experiment

MIN_OPEN_FILES = 64  # a run of two ranks needs about half


def print_notice_of_shared_cores(cfg: Experiment, ranks: int) -> None:
    """Print a notice if this host has fewer CPU cores than ranks.

    The check is skipped for runs on GPUs.
    """
    cores = count_host_cores()
    if ranks > cores and not provenance.uses_gpus(cfg.launch, ranks):
        print(f"{ranks} ranks share {format_count(cores, 'core')} of this host; steps will be slow", flush=True)


def check_resources(cfg: Experiment) -> None:
    """Raise UserError if the limit on open files is too low, or if the model does not fit into the memory of this host.

    The memory is not checked for runs on GPUs.
    """
    limit = process_limits.get_open_file_limit()
    if limit < MIN_OPEN_FILES:
        raise UserError(f"ulimit -n is {limit}, but a run opens more files and connections; use ulimit -n 1024")
    if not provenance.uses_gpus(cfg.launch, cfg.processes // cfg.launch.nodes):
        host_memory.check_host_memory(cfg)
