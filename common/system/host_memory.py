"""Check before a run starts whether this host has enough memory for the model. This module does not import torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from common.system.errors import UserError
from common.system.process_limits import list_control_groups
from common.system.text import format_count, read_text_or_empty
from configs.fields import find_group
from configs.memory import StateSharding
from configs.shared import Experiment, Optim, TrainingExperiment

UNLIMITED_BYTES = 1 << 60  # cgroups report a number near 2**63 if there is no limit
FILE_CACHE = re.compile(r"^(?:total_)?inactive_file (\d+)$", re.MULTILINE)  # memory that the kernel frees on demand
OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def check_host_memory(settings: Experiment) -> None:
    """Raise UserError if the model does not fit into the free memory of this host.

    The model needs memory for the parameters, gradients and optimizer state of all ranks on this host.
    """
    if not isinstance(settings, TrainingExperiment):
        return
    needed = estimate_memory_bytes(settings)
    available, limit_name = measure_available_memory()
    if needed > available:
        ranks = format_count(settings.processes // settings.launch.nodes, "rank")
        raise UserError(
            f"the model needs {needed / 1e9:,.1f} GB per host for parameters, gradients and optimizer state of "
            f"{ranks}, but {available / 1e9:,.1f} GB are free ({limit_name}); choose a smaller model or fewer ranks"
        )


def estimate_memory_bytes(settings: TrainingExperiment) -> float:
    """Return the estimated memory of the model per host in bytes.

    Each rank first builds the whole model. During training, each replica of the model needs memory for parameters,
    gradients and optimizer state. With zero1=true, all replicas together have one optimizer state. The parameters that
    FSDP gathers in a step are not included.
    """
    parameter_bytes = settings.estimated_parameters * (8 if settings.dtype == "float64" else 4)
    while_building = settings.processes / settings.launch.nodes * parameter_bytes
    replicas = settings.replicas_per_host
    sharding = find_group(settings, StateSharding)
    is_state_divided = sharding is not None and sharding.zero1
    states = 1 / settings.launch.nodes if is_state_divided else replicas
    in_training = parameter_bytes * (2 * replicas + count_state_tensors(settings.optim) * states)
    return max(while_building, in_training)


def count_state_tensors(optim: Optim) -> int:
    """Return the number of tensors of the size of a parameter in the state of an optimizer."""
    return {"sgd": int(optim.momentum > 0), "lars": 1}.get(optim.name, 2)


def measure_available_memory() -> tuple[int, str]:
    """Return the number of bytes that a new process can allocate, and a description of the limit."""
    limits = [(read_free_memory(), "memory of the host"), *read_cgroup_limits()]
    slurm_limit = read_slurm_limit()
    if slurm_limit is not None:
        limits.append((slurm_limit, "memory that SLURM allocated to the job"))
    return min(limits)


def read_free_memory() -> int:
    """Return the free memory of this host in bytes."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(match[1]) * 1024 if match else UNLIMITED_BYTES


def read_slurm_limit() -> int | None:
    """Return the memory, in bytes, that SLURM allocated to the job on each host, or None if there is no limit."""
    per_host = parse_count(os.environ.get("SLURM_MEM_PER_NODE", ""))
    if per_host:
        return per_host * 2**20
    per_core = parse_count(os.environ.get("SLURM_MEM_PER_CPU", ""))
    cores = os.environ.get("SLURM_CPUS_ON_NODE", "")
    if per_core and cores.isdecimal():
        return per_core * int(cores) * 2**20
    return None


def parse_count(text: str) -> int:
    """Parse a non-negative integer. Return 0 for any other text."""
    return int(text) if text.isdecimal() else 0


def read_cgroup_limits() -> list[tuple[int, str]]:
    """Return how many bytes each memory control group of this process can still allocate, with a description.

    Both versions of control groups, 1 and 2, are supported.
    """
    limits = []
    for name, folder in list_control_groups("memory"):
        limit = read_text_or_empty(f"{folder}/memory.max") or read_text_or_empty(f"{folder}/memory.limit_in_bytes")
        usage = read_text_or_empty(f"{folder}/memory.current") or read_text_or_empty(f"{folder}/memory.usage_in_bytes")
        if limit.strip().isdecimal() and usage.strip().isdecimal() and int(limit) < UNLIMITED_BYTES:
            cached = map(int, FILE_CACHE.findall(read_text_or_empty(f"{folder}/memory.stat")))
            needed = int(usage) - max(cached, default=0)
            limits.append((max(0, int(limit) - needed), f"limit of control group {name}"))
    return limits


def count_oom_kills() -> int:
    """Return the number of processes that the kernel has killed since boot because memory ran out."""
    match = OOM_KILLS.search(read_text_or_empty("/proc/vmstat"))
    return int(match[1]) if match else 0
