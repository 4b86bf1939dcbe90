"""Starting, joining and ending processes: whatever happens, one clear answer and nothing left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common import processes
from common.errors import LEFT
from common.folder import Folder
from common.launch import Place, first_host, outside
from slurm import status
from tests.harness.processes import ROOT, command, environment, processes_of, run

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
        (TORCHRUN, Place(3, 4, 1, 2, 1, 2, "torchrun", "a:29400")),
        (SLURM, Place(2, 4, 0, 2, 1, 2, "slurm", "gpu07", "40017.0.0")),
        (SLURM | TORCHRUN, Place(3, 4, 1, 2, 1, 2, "torchrun", "a:29400")),
    ],
    ids=["laptop", "batch script", "torchrun", "srun", "torchrun in an allocation"],
)
def test_place_is_read_from_the_environment(environ: dict[str, str], place: Place | None) -> None:
    assert outside(environ) == place


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("node1", "node1"), ("node1,node2", "node1"), ("n[03-07,9],x1", "n03"), ("a-[2,4]", "a-2"), ("x1,n[3-4]", "x1")],
)
def test_first_host_of_a_nodelist(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def fork(tmp_path: Path, body: str, size: int = 3, **kwargs: object) -> subprocess.CompletedProcess[str]:
    """Run fork_all in a script of its own with the given body(place)."""
    script = tmp_path / "script.py"
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    script.write_text(
        "import os, signal, sys, time\n"
        "from common import launch, processes\nfrom common.config import UserError\nfrom configs.shared import Launch\n"
        "import torch, torch.distributed as dist\n"
        "settings = Launch(device='cpu', setup_timeout=3, step_timeout=3)\n"
        f"def body(place):\n{indented}"
        f"sys.exit(processes.fork_all(body, {size}, 1, lambda: None))\n"
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert time.monotonic() - start < 30
    assert not processes_of(str(script))
    return done


JOIN = "with launch.group(place, settings) as world:\n"


def test_ranks_meet_by_name_where_a_barrier_would_keep_gpus_busy(tmp_path: Path) -> None:
    """What ranks with nccl do, with the real store."""
    body = JOIN + "    import dataclasses, pathlib\n    there = pathlib.Path('.')\n"
    body += "    for name in ('a', 'b'):\n"
    body += "        if world.rank == 1: time.sleep(0.3); (there / name).touch()\n"
    body += "        dataclasses.replace(world, backend='nccl').meet(name)\n"
    body += "        assert (there / name).exists()"
    done = fork(tmp_path, body)
    assert done.returncode == 0, done.stderr


def test_processes_meet_and_add_up(tmp_path: Path) -> None:
    body = JOIN + "    x = torch.ones(1) * world.rank\n    dist.all_reduce(x)\n    assert x.item() == 3, x\n"
    body += "    assert world.broadcast(world.rank) == 0 and len(world.gather(1)) == (3 if world.is_main else 0)\n"
    body += "    assert torch.get_num_threads() == max(1, len(os.sched_getaffinity(0)) // 3) == world.threads"
    done = fork(tmp_path, body)
    assert done.returncode == 0, done.stderr


def test_first_traceback_is_shown_once(tmp_path: Path) -> None:
    body = JOIN + "    if world.rank == 1:\n        raise KeyError('the cause')\n    dist.barrier()"
    done = fork(tmp_path, body)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1 and "KeyError: 'the cause'" in done.stderr
    assert "error: rank 1 failed as shown above; the other 2 were stopped" in done.stderr


def test_user_errors_of_a_rank_have_no_traceback(tmp_path: Path) -> None:
    done = fork(tmp_path, "raise UserError('change this')")
    assert done.returncode == 2
    assert done.stderr == "error: change this\n"


def test_killed_rank_is_named(tmp_path: Path) -> None:
    body = JOIN + "    if world.rank == 2:\n        os.kill(os.getpid(), signal.SIGKILL)\n    dist.barrier()"
    done = fork(tmp_path, body)
    assert done.returncode == 128 + signal.SIGKILL
    assert "error: rank 2 (pid" in done.stderr and "was killed by SIGKILL" in done.stderr
    assert "Traceback" not in done.stderr


def test_rank_that_does_not_arrive_is_named(tmp_path: Path) -> None:
    done = fork(tmp_path, "if place.rank == 1:\n    time.sleep(20)\n" + JOIN + "    pass")
    assert done.returncode == 2
    assert done.stderr == "error: rank 1 did not arrive within 3 s; see its log, or raise launch.setup_timeout\n"


def test_rank_that_hangs_ends_the_run_after_the_step_timeout(tmp_path: Path) -> None:
    done = fork(tmp_path, JOIN + "    if world.rank == 0:\n        time.sleep(60)\n    dist.barrier()")
    assert done.returncode == 1
    assert "Timed out" in done.stderr or "timed out" in done.stderr


def test_rank_that_ignores_being_asked_is_ended(tmp_path: Path) -> None:
    body = "if place.rank == 0:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    time.sleep(60)\n"
    done = fork(tmp_path, body + "time.sleep(0.5)\nsys.exit(3)")
    assert done.returncode == 1


def test_only_meeting_places_of_killed_launchers_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not (launcher := os.fork()):
        try:
            processes.meeting_place()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(launcher, 0)
    (killed,) = tmp_path.iterdir()
    living, lock = processes.meeting_place()
    for path in (killed, living):
        os.utime(path, (0, 0))
    unlocked = tmp_path / "rendezvous-1-new"  # about to be locked
    unlocked.mkdir()
    mine, other = processes.meeting_place()
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


Start = Callable[[Path], subprocess.Popen[str]]


@pytest.fixture
def start_long_run(digits: tuple[str, ...]) -> Iterator[Start]:
    """Starts a run that would take minutes and catches it in the middle of training; none outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def start(runs: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command("mnist_pipeline", *digits, "steps=0", "epochs=1000", runs=runs),
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # a shell starts what it puts in the background with SIGINT ignored, and that is inherited
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
        started.append(process)
        deadline = time.monotonic() + 60
        while not any(runs.glob("*/attempts/0001/metrics.jsonl")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        return process

    yield start
    for process in started:
        process.kill()  # its ranks end with it
        process.wait()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_interrupt_ends_everything_and_two_runs_do_not_collide(tmp_path: Path, start_long_run: Start) -> None:
    first, second = start_long_run(tmp_path / "a"), start_long_run(tmp_path / "b")
    assert len(children(first.pid)) == 2
    loopback = {"0100007F"}
    assert listening(children(first.pid)) <= loopback and listening(children(second.pid)) <= loopback
    os.killpg(first.pid, signal.SIGINT)  # what Ctrl-C on a terminal does
    _, err = first.communicate(timeout=10)
    assert first.returncode == 128 + signal.SIGINT
    assert "saving after the next step" in err and "metrics up to step" in err and "Traceback" not in err
    (folder,) = (Folder(path) for path in (tmp_path / "a").iterdir())
    assert folder.result["exit_status"] == first.returncode and folder.result["last_step"] > 0
    assert status.state_of(folder) == ("CANCELLED", "stopped by Ctrl-C")
    assert not processes_of(str(tmp_path / "a"))
    assert second.poll() is None
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=10)
    assert second.returncode == LEFT
    assert not processes_of(str(tmp_path / "b"))


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_stage_ends_the_run(tmp_path: Path, start_long_run: Start, rank: int) -> None:
    process = start_long_run(tmp_path)
    os.kill(children(process.pid)[rank], signal.SIGKILL)
    killed = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - killed < 5 + 2  # five seconds, and what a busy machine needs to tell
    assert process.returncode == 128 + signal.SIGKILL
    assert f"error: rank {rank} (pid" in err and "killed by SIGKILL" in err and "Traceback" not in err
    (folder,) = tmp_path.iterdir()
    assert (folder / "attempts/0001/metrics.jsonl").read_text().startswith('{"global_step": 1,')
    assert '"state": "failed"' in (folder / "result.json").read_text()
    assert not processes_of(str(tmp_path))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_torchrun_starts_the_same_script(tmp_path: Path, digits: tuple[str, ...]) -> None:
    own = run("mnist_pipeline", *digits, runs=tmp_path / "own")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    script = command("mnist_pipeline", *digits, runs=tmp_path / "torchrun")[1:]
    done = subprocess.run(
        [*launcher, f"--master-port={free_port()}", *script],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "torchrun").iterdir()
    rows = [line for line in (folder / "attempts/0001/metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert len(rows) == 30 == len(own.losses)
    assert all(f'"loss": {loss!r}' in row for row, loss in zip(rows, own.losses, strict=True))
    assert '"launched_by": "torchrun"' in (folder / "meta.json").read_text()


def test_torchrun_that_starts_again_goes_on_in_the_same_folder(tmp_path: Path, digits: tuple[str, ...]) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    words = ("steps=200", "batch=16", "checkpoint.every_steps=5", "data.test_limit=100")
    script = command("ddp_multinode", *digits, *words, runs=tmp_path / "runs")[1:]
    places = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    launched = subprocess.Popen([*launcher, *places, *script], cwd=ROOT, env=environment(), stderr=subprocess.PIPE)
    try:
        while not list(tmp_path.glob("runs/*/attempts/0001/checkpoints/step-*")):
            assert launched.poll() is None
            time.sleep(0.05)
        os.kill(children(launched.pid)[1], signal.SIGKILL)
        _, err = launched.communicate(timeout=90)
    finally:
        launched.kill()
    assert launched.returncode == 0, err.decode()[-3000:]
    (path,) = (tmp_path / "runs").iterdir()
    folder = Folder(path)
    assert folder.result["state"] == "finished" and len(folder.attempts()) == 2
    assert folder.attempts()[1].origin[1] >= 5  # type: ignore[index]
    assert [row["global_step"] for row in folder.metrics() if "loss" in row] == list(range(1, 201))


def test_torchrun_with_the_wrong_number_is_refused(tmp_path: Path, digits: tuple[str, ...]) -> None:
    environ: dict[str, Any] = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environ["MASTER_PORT"] = str(free_port())
    done = run("mnist_pipeline", *digits, runs=tmp_path, timeout=60, **environ)
    assert done.status == 2
    assert done.err == "error: torchrun started 1 processes, the settings need 2\n"
