"""Starting, joining and ending processes: whatever happens, one clear answer and nothing left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.config import config
from common.ranks.rank_info import RankInfo, parse_first_host, read_rank_info
from common.ranks.rendezvous_dir import create_rendezvous_dir
from common.runs.folder import RunFolder, read_json
from common.system import host_memory, process_limits
from common.system.exit_status import EXIT_RESUMABLE
from configs.amp_accum import Config as Precision
from configs.resnet_modelparallel import Config as Split
from slurm.reports import status
from tests.harness import warm
from tests.harness.long_runs import ENDLESS, free_port, only_folder, ranks_of, train_long
from tests.harness.processes import PATIENCE, command, environment, processes_of, run, wait_until

TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "MASTER_ADDR": "a", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "40017", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[07-08]",
}  # fmt: skip
BATCH = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "gpu[07-08]"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, None),
        (BATCH, None),
        (TORCHRUN, RankInfo(3, 4, 1, 2, 2, "torchrun", "a:29400")),
        (SLURM, RankInfo(2, 4, 0, 2, 2, "slurm", "gpu07", "40017.0.0")),
        (SLURM | TORCHRUN, RankInfo(3, 4, 1, 2, 2, "torchrun", "a:29400")),
    ],
    ids=["laptop", "batch script", "torchrun", "srun", "torchrun in an allocation"],
)
def test_place_is_read_from_the_environment(environ: dict[str, str], place: RankInfo | None) -> None:
    assert read_rank_info(environ) == place


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("node1", "node1"), ("node1,node2", "node1"), ("n[03-07,9],x1", "n03"), ("a-[2,4]", "a-2"), ("x1,n[3-4]", "x1")],
)
def test_first_host_of_a_nodelist(nodelist: str, host: str) -> None:
    assert parse_first_host(nodelist) == host


def fork_ranks(case: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Have three forked ranks do a case of tests/harness/ranks.py; none of them outlives it."""
    argv = [sys.executable, "-m", "tests.harness.ranks", case, str(folder)]
    done = warm.execute(argv, env=environment(), timeout=PATIENCE)
    assert not processes_of(str(folder))
    return done


def test_ranks_meet_by_name_where_a_barrier_would_keep_gpus_busy(tmp_path: Path) -> None:
    done = fork_ranks("meet_by_name", tmp_path)
    assert done.returncode == 0, done.stderr


def test_processes_meet_and_add_up(tmp_path: Path) -> None:
    done = fork_ranks("add_up", tmp_path)
    assert done.returncode == 0, done.stderr


def test_first_traceback_is_shown_once(tmp_path: Path) -> None:
    done = fork_ranks("one_raises", tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1 and "KeyError: 'the cause'" in done.stderr
    assert "error: rank 1 failed as shown above; the other 2 ranks were stopped" in done.stderr


def test_user_errors_of_a_rank_have_no_traceback(tmp_path: Path) -> None:
    done = fork_ranks("user_error", tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: change this\n"


def test_killed_rank_is_named(tmp_path: Path) -> None:
    done = fork_ranks("one_is_killed", tmp_path)
    assert done.returncode == 128 + signal.SIGKILL
    assert "error: rank 2 (pid" in done.stderr and "was killed by SIGKILL" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 300 MB, without swap."""
    first = Path("/sys/fs/cgroup/memory")
    base, limit = (first, "memory.limit_in_bytes") if first.is_dir() else (Path("/sys/fs/cgroup"), "memory.max")
    group = base / f"test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(300 << 20))
    except OSError as error:
        pytest.skip(f"needs a control group of its own: {error}")
    for name, value in (("memory.memsw.limit_in_bytes", str(300 << 20)), ("memory.swap.max", "0")):
        with contextlib.suppress(OSError):  # where the kernel counts swap
            (group / name).write_text(value)
    yield group
    end = time.monotonic() + 10
    while group.exists() and time.monotonic() < end:
        with contextlib.suppress(OSError):
            group.rmdir()


def test_a_rank_that_the_kernel_kills_for_memory_is_told_from_others(small_group: Path, tmp_path: Path) -> None:
    (tmp_path / "group").write_text(str(small_group))
    done = fork_ranks("one_takes_too_much", tmp_path)
    assert done.returncode == 128 + signal.SIGKILL
    assert "was killed by SIGKILL: the system ran out of memory; the other 2 ranks were stopped" in done.stderr


def test_a_model_that_cannot_fit_is_refused_before_anything_starts(tmp_path: Path, cache: Path) -> None:
    words = ("data.name=digits", f"data.cache={cache}", "width=65536", "depth=256")
    done = run("mnist_pipeline", *words, runs=tmp_path / "runs")
    assert done.status == 2 and "Traceback" not in done.err
    assert re.search(r"the model needs [\d,]+\.\d GB per host .* of 2 ranks, but [\d.]+ GB are free", done.err)
    assert not (tmp_path / "runs").exists()
    done = run("resnet_modelparallel", "width=4096", "data.name=generated", runs=tmp_path / "runs")
    assert done.status == 2 and "the model needs" in done.err


def test_missing_weights_are_refused_before_anything_starts(tmp_path: Path) -> None:
    words = ("weights=nowhere.pt", "data.name=generated", f"data.cache={tmp_path / 'sets'}")
    done = run("ddp_multinode", *words, runs=tmp_path / "runs")
    assert done.status == 2 and done.err.startswith("error: weights=nowhere.pt: no such file, checkpoint folder or run")
    assert not list(tmp_path.iterdir())


def test_the_smallest_of_all_limits_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    free, what = host_memory.measure_available_memory()
    assert 1 << 28 < free < 1 << 50 and what
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "100")
    assert host_memory.measure_available_memory() == (100 << 20, "memory that SLURM allocated to the job")


def test_files_that_the_kernel_keeps_are_no_use_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/self/cgroup": "0::/job\n",
        "/sys/fs/cgroup/job/memory.max": "1000000\n",
        "/sys/fs/cgroup/job/memory.current": "990000\n",
        "/sys/fs/cgroup/job/memory.stat": "anon 90000\nactive_file 100\ninactive_file 900000\n",
    }
    for module in (host_memory, process_limits):
        monkeypatch.setattr(module, "read_text_or_empty", lambda path: files.get(path, ""))
    assert host_memory.read_cgroup_limits() == [(910_000, "limit of control group /job")]


def test_memory_for_each_core_is_a_limit_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_MEM_PER_NODE", raising=False)
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "10")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "4")
    assert host_memory.read_slurm_limit() == 40 << 20


def test_replicas_and_known_models_are_counted() -> None:
    words = ["model=resnet18", "width=64", "stages=2", "balance=parameters"]
    one, four = (config.load_config(Split, [*words, f"replicas={count}"], {}) for count in (1, 4))
    assert host_memory.estimate_memory_bytes(four) > 3 * host_memory.estimate_memory_bytes(one)
    two = config.load_config(Precision, ["model=resnet50"], {})
    assert host_memory.estimate_memory_bytes(two) > 2 * 3 * 4 * 23e6


def test_ranks_of_a_launcher_that_are_told_before_the_first_step_leave_at_once(tmp_path: Path, cache: Path) -> None:
    """One waits for a message of the other, which leaves."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = (f"runs={tmp_path / 'runs'}", "data.name=digits", f"data.cache={cache}", "launch.step_timeout=100")
    argv = [sys.executable, "-m", "tests.harness.waiting_ranks", *words]
    ranks = [
        warm.Command(argv, env=environment(**place, RANK=str(rank), LOCAL_RANK=str(rank)), session=True)
        for rank in range(2)
    ]
    wait_until(lambda: all("waiting" in rank.out for rank in ranks), "both stand in main()")
    for rank in ranks:
        rank.send_signal(signal.SIGUSR2)
    assert [rank.wait(60) for rank in ranks] == [EXIT_RESUMABLE, EXIT_RESUMABLE], ranks[0].err + ranks[1].err
    assert "Traceback" not in ranks[0].err + ranks[1].err
    (path,) = (tmp_path / "runs").iterdir()
    assert read_json(path / "result.json")["reason"] == "stopped on request, before the first step"
    assert f"no checkpoint found; to restart from step 0: make exp RESUME={path}\n" in ranks[0].err


def test_rank_that_does_not_arrive_is_named(tmp_path: Path) -> None:
    done = fork_ranks("one_does_not_arrive", tmp_path)
    assert done.returncode == 2
    assert (
        done.stderr
        == "error: rank 1 did not join within 3 s; check the logs of the missing ranks, or raise launch.setup_timeout\n"
    )


def test_rank_that_hangs_ends_the_run_after_the_step_timeout(tmp_path: Path) -> None:
    done = fork_ranks("one_hangs", tmp_path)
    assert done.returncode == 1
    assert "Timed out" in done.stderr or "timed out" in done.stderr


def test_rank_that_ignores_being_asked_is_ended(tmp_path: Path) -> None:
    assert fork_ranks("one_ignores_being_asked", tmp_path).returncode == 1


def test_only_meeting_places_of_killed_launchers_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not (launcher := os.fork()):
        try:
            create_rendezvous_dir()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(launcher, 0)
    (killed,) = tmp_path.iterdir()
    living, lock = create_rendezvous_dir()
    for path in (killed, living):
        os.utime(path, (0, 0))
    unlocked = tmp_path / "rendezvous-1-new"  # about to be locked
    unlocked.mkdir()
    mine, other = create_rendezvous_dir()
    assert set(tmp_path.iterdir()) == {living, unlocked, mine}
    os.close(lock)
    os.close(other)


def listening(pids: list[int]) -> set[str]:
    """Local addresses on which the processes accept TCP connections."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(str(link.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].split(":")[0])
    return found


def test_interrupt_ends_everything_and_two_runs_do_not_collide(tmp_path: Path, digits: tuple[str, ...]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with (
        train_long("mnist_pipeline", *digits, *ENDLESS, runs=a) as first,
        train_long("mnist_pipeline", *digits, *ENDLESS, runs=b) as second,
    ):
        assert len(ranks_of(first)) == 2
        loopback = {"0100007F"}
        assert listening(ranks_of(first)) <= loopback and listening(ranks_of(second)) <= loopback
        os.killpg(first.pid, signal.SIGINT)  # what Ctrl-C on a terminal does
        _, err = first.communicate(PATIENCE)
        assert first.returncode == 128 + signal.SIGINT
        assert "a checkpoint will be saved after the current step (if training has started)" in err
        assert "metrics up to step" in err and "Traceback" not in err
        folder = only_folder(a)
        assert folder.result["exit_status"] == first.returncode and folder.result["last_step"] > 0
        assert status.read_state(folder) == ("CANCELLED", "stopped by Ctrl-C")
        assert not processes_of(str(a))
        assert second.poll() is None
        second.send_signal(signal.SIGTERM)
        second.communicate(PATIENCE)
        assert second.returncode == EXIT_RESUMABLE
        assert not processes_of(str(b))


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_stage_ends_the_run(tmp_path: Path, digits: tuple[str, ...], rank: int) -> None:
    with train_long("mnist_pipeline", *digits, *ENDLESS, "launch.step_timeout=600", runs=tmp_path) as process:
        os.kill(ranks_of(process)[rank], signal.SIGKILL)
        killed = time.monotonic()
        _, err = process.communicate(PATIENCE)
        assert time.monotonic() - killed < 20, "five seconds on a quiet machine, and far less than the step timeout"
        assert process.returncode == 128 + signal.SIGKILL
        assert f"error: rank {rank} (pid" in err and "killed by SIGKILL" in err and "Traceback" not in err
        attempt = only_folder(tmp_path).list_attempts()[0]
        assert attempt.metrics_file.read_text().startswith('{"global_step": 1,')
        assert attempt.result["state"] == "failed"
        assert not processes_of(str(tmp_path))


def test_processes_of_a_launcher_train_as_own_ones(tmp_path: Path, digits: tuple[str, ...]) -> None:
    own = run("mnist_pipeline", *digits, runs=tmp_path / "own")
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    argv = command("mnist_pipeline", *digits, runs=tmp_path / "theirs")
    ranks = [
        warm.Command(argv, env=environment(**place, RANK=str(rank), LOCAL_RANK=str(rank)), session=True)
        for rank in range(2)
    ]
    assert [rank.wait(PATIENCE) for rank in ranks] == [0, 0], ranks[0].err + ranks[1].err
    (path,) = (tmp_path / "theirs").iterdir()
    folder = RunFolder(path)
    assert [row["loss"] for row in folder.read_metrics() if "loss" in row] == own.losses and len(own.losses) == 30
    assert read_json(path / "meta.json")["world"]["launched_by"] == "torchrun"


def test_torchrun_with_the_wrong_number_is_refused(tmp_path: Path, digits: tuple[str, ...]) -> None:
    environ: dict[str, Any] = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    done = run("mnist_pipeline", *digits, runs=tmp_path, timeout=60, **environ)
    assert done.status == 2
    remedy = "use --nproc-per-node=2, or change the number of stages"
    assert done.err == f"error: torchrun started 1 rank, but the settings require 2; {remedy}\n"
    done = run("ddp_multinode", *digits, "processes_per_node=2", runs=tmp_path, timeout=60, **environ)
    assert done.status == 2 and "or change processes_per_node" in done.err
    assert not list(tmp_path.iterdir())


def test_the_number_of_ranks_is_that_of_torchrun(tmp_path: Path, digits: tuple[str, ...]) -> None:
    place: dict[str, Any] = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    done = run("ddp_multinode", *digits, "steps=3", runs=tmp_path, **place)
    assert done.status == 0, done.err
    assert len(done.losses) == 3 and read_json(done.folder.path / "meta.json")["world"]["processes"] == 1
