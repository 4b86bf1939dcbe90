"""The memory that a model needs, and the memory that a host has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.config import config
from common.system import host_memory, process_limits
from configs.amp_accum import Config as PrecisionConfig
from configs.ddp_multinode import Config as DataParallelConfig
from configs.resnet_modelparallel import Config as PipelineConfig
from tests.harness.commands.processes import run_experiment


def test_a_model_that_does_not_fit_is_refused_before_ranks_start(tmp_path: Path, cache: Path) -> None:
    settings = ("data.name=digits", f"data.cache={cache}", "width=65536", "depth=256")
    pipeline = run_experiment("mnist_pipeline", *settings, runs=tmp_path / "runs", status=2)
    message = r"the model needs [\d,]+\.\d GB per host .* of 2 ranks, but [\d.]+ GB are free"
    assert re.search(message, pipeline.stderr)
    assert not (tmp_path / "runs").exists()

    resnet = run_experiment(
        "resnet_modelparallel", "width=4096", "data.name=generated", runs=tmp_path / "runs", status=2
    )
    assert "the model needs" in resnet.stderr


def test_the_smallest_limit_is_the_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    available, limit_name = host_memory.measure_available_memory()
    assert 1 << 28 < available < 1 << 50
    assert limit_name
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "100")
    assert host_memory.measure_available_memory() == (100 << 20, "memory that SLURM allocated to the job")


def test_cached_files_do_not_reduce_the_free_memory_of_a_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "/proc/self/cgroup": "0::/job\n",
        "/sys/fs/cgroup/job/memory.max": "1000000\n",
        "/sys/fs/cgroup/job/memory.current": "990000\n",
        "/sys/fs/cgroup/job/memory.stat": "anon 90000\nactive_file 100\ninactive_file 900000\n",
    }
    for module in (host_memory, process_limits):
        monkeypatch.setattr(module, "read_text_or_empty", lambda path: texts.get(path, ""))
    assert host_memory.read_cgroup_limits() == [(910_000, "limit of control group /job")]


def test_the_slurm_limit_per_core_is_multiplied_by_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_MEM_PER_NODE", raising=False)
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "10")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "4")
    assert host_memory.read_slurm_limit() == 40 << 20


def test_the_estimate_includes_all_replicas() -> None:
    settings = ["model=resnet18", "width=64", "stages=2", "balance=parameters"]
    one_replica = config.load_config(PipelineConfig, [*settings, "replicas=1"], {})
    four_replicas = config.load_config(PipelineConfig, [*settings, "replicas=4"], {})
    one_replica_bytes = host_memory.estimate_memory_bytes(one_replica)
    assert host_memory.estimate_memory_bytes(four_replicas) > 3 * one_replica_bytes


def test_the_estimate_includes_gradients_and_optimizer_state() -> None:
    resnet50 = config.load_config(PrecisionConfig, ["model=resnet50"], {})
    assert host_memory.estimate_memory_bytes(resnet50) > 2 * 3 * 4 * 23e6


TENSORS_PER_HOST = {
    "": 4 * 4,
    "strategy=fsdp": 4,  # one replica needs as much memory as the models that the ranks build
    "strategy=fsdp fsdp=2": 2 * 4,
    "zero1=true": 4 * 2 + 2,
    "zero1=true launch.nodes=2 processes_per_node=2": 2 * 2 + 1,
}


@pytest.mark.parametrize("settings, tensors", TENSORS_PER_HOST.items())
def test_the_estimate_counts_divided_tensors_once(settings: str, tensors: int) -> None:
    arguments = ["model=resnet50", "optim.name=adam", "processes_per_node=4", *settings.split()]
    cfg = config.load_config(DataParallelConfig, arguments, {})
    parameter_bytes = 4 * cfg.estimated_parameters
    assert host_memory.estimate_memory_bytes(cfg) == pytest.approx(tensors * parameter_bytes)
