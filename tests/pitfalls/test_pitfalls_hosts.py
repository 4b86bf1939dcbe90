"""Mistakes with several hosts: what they do, and what is correct."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness.commands import execution
from tests.harness.commands.processes import FinishedRun, make_environment
from tests.harness.pitfalls.host_pitfalls import TIMEOUT_SECONDS, find_namespace_problem
from tests.harness.pitfalls.outcomes import collect_outcome
from tests.harness.pitfalls.rank_warnings import LOGGER_WARNING, PYTHON_WARNING, RUN_WARNING


def execute(*arguments: str, runs: Path) -> FinishedRun:
    completed = execution.execute_command([sys.executable, "-m", *arguments], env=make_environment())
    assert completed.returncode == 0, completed.stderr
    return FinishedRun(completed.returncode, completed.stdout, completed.stderr, runs)


def test_hosts_do_not_meet_at_their_loopback_addresses() -> None:
    if problem := find_namespace_problem():
        pytest.skip(f"NOT TESTED, networks cannot be created here: {problem}")
    outcome = collect_outcome("host_pitfalls", "loopback_master_address")
    first, second = outcome["mistake"]
    assert "1/2 clients joined" in first["error"], "rank 0 waits alone"
    assert "trying to connect to (127.0.0.1, 29500)" in second["error"], "no process listens on the second host"
    assert min(first["seconds"], second["seconds"]) >= TIMEOUT_SECONDS
    assert outcome["correct"] == [{"sum": 1.0, "hosts": ["host0", "host1"]}] * 2


def test_two_node_ranks_on_one_machine_are_one_host(digits: tuple[str, ...], tmp_path: Path) -> None:
    ranks = collect_outcome("host_pitfalls", "two_node_ranks_on_one_host")
    assert [rank["sum"] for rank in ranks] == [0 + 1 + 2 + 3] * 4, "all four ranks join, without an error"
    assert [rank["node_rank"] for rank in ranks] == [0, 0, 1, 1]
    assert len({rank["host"] for rank in ranks}) == 1
    assert [rank["device"] for rank in ranks] == ["cuda:0", "cuda:1"] * 2, "two ranks share each device"
    assert [rank["cores"] for rank in ranks] == [ranks[0]["cores"]] * 4
    settings = shlex.join([f"runs={tmp_path}", *digits, "steps=2", "data.test_limit=10"])
    options = ("--launch=local", "--nodes=2", f"--args={settings}")
    completed = execute("slurm", "exp", *options, "--", "ddp_multinode", runs=tmp_path)
    assert "not using SLURM: 2 nodes are simulated by processes on this machine" in completed.stdout
    world = json.loads((completed.folder.list_attempts()[0].attempt_folder / "world.json").read_text())
    assert world["nodes"] == 2
    assert world["hosts"] == [ranks[0]["host"]] * 2, "both simulated nodes have the name of this host"


def test_a_log_level_per_rank_loses_the_warnings_of_other_ranks(digits: tuple[str, ...], tmp_path: Path) -> None:
    settings = (f"runs={tmp_path}", *digits, "steps=2", "data.test_limit=10", "log.level=error")
    completed = execute("tests.harness.pitfalls.rank_warnings", *settings, runs=tmp_path)
    files = [path for path in completed.folder.path.rglob("*") if path.is_file() and "code" not in path.parts]
    texts = [completed.stdout, completed.stderr, *(path.read_text(errors="replace") for path in files)]
    assert LOGGER_WARNING not in "\n".join(texts)
    logs = [completed.folder.list_attempts()[0].log_file(rank).read_text() for rank in range(2)]
    assert f"WARNING {RUN_WARNING}" in logs[1]
    assert f"UserWarning: {PYTHON_WARNING}" in logs[1]
    for text in (completed.stdout, completed.stderr, logs[0]):
        assert RUN_WARNING not in text
        assert PYTHON_WARNING not in text


def test_a_number_of_ranks_without_the_rank_starts_no_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="environment variable RANK expected, but not set"):
        dist.init_process_group("gloo", world_size=2)
    with pytest.raises(ValueError, match="rank parameter missing"):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", world_size=2)
    assert not dist.is_initialized()


def test_the_nccl_of_conda_is_not_the_one_that_torch_loads(tmp_path: Path) -> None:
    """The wheel names its own NCCL in its requirements and in a path that precedes LD_LIBRARY_PATH."""
    if torch.version.cuda is None:
        pytest.skip("NOT TESTED, this PyTorch has no NCCL: it was built without CUDA")
    requirements = [name for name in importlib.metadata.requires("torch") or [] if name.startswith("nvidia-nccl")]
    package, _, version = requirements[0].partition(";")[0].strip().partition("==")
    assert importlib.metadata.version(package) == version
    assert ".".join(map(str, torch.cuda.nccl.version())) == version

    library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    wheel_nccl = next(path for path in Path(torch.__file__).parents[1].glob("nvidia/nccl/lib/libnccl.so.2"))
    (tmp_path / "libnccl.so.2").symlink_to(wheel_nccl)  # stands for a copy that conda has installed
    environment = make_environment(LD_LIBRARY_PATH=str(tmp_path))
    linked = execution.execute_command(["ldd", str(library)], env=environment, status=0).stdout
    paths = [line.split()[2] for line in linked.splitlines() if "libnccl.so.2" in line]
    assert [Path(path).parent.resolve() for path in paths] == [wheel_nccl.parent]
