"""Messages through shared memory: nothing stays behind, a small /dev/shm is no obstacle, silence is told."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.processes import ROOT, environment

SCRIPT = """
import os, resource, sys, time
import torch
from common import launch, memory, processes
from common.messages import Messages, routes
from common.schedules import Action, gpipe
from configs.shared import Launch

what = sys.argv[1]
shapes = [torch.Size([30_000]), torch.Size([2])]


def body(place):
    with launch.group(place, Launch(device="cpu", threads=1, step_timeout=2)) as world:
        if what == "small":
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        found = routes(gpipe(2, 2, 2), shapes, 4)
        messages = Messages(world, found, torch.float32, 2, "network" if what == "network" else "auto")
        assert (messages.memory is not None) == (what in ("memory", "silent"))
        for step in range(3):
            messages.begin()
            for m in range(2):
                value = torch.full((4, 30_000), 10.0 * step + m)
                if world.rank == 0:
                    messages.give(Action("F", 1, m), value)
                    assert torch.equal(messages.take(Action("B", 0, m)), value + 1)
                else:
                    if what == "silent" and step == 2:
                        time.sleep(60)
                    given = messages.take(Action("F", 1, m))
                    messages.give(Action("B", 0, m), given.t().contiguous().t() + 1)
            messages.end()
        world.gather(None)


before = set(os.listdir("/dev/shm"))
status = processes.fork_all(body, 2, 1, lambda: None)
assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("pipeline-")}
sys.exit(status)
"""


def exchange(what: str) -> subprocess.CompletedProcess[str]:
    """Three steps of messages between two processes."""
    words, env = [sys.executable, "-c", SCRIPT, what], environment(PYTHONPATH=str(ROOT))
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("what", ["memory", "network", "small"])
def test_every_way_delivers_and_leaves_nothing(what: str) -> None:
    done = exchange(what)
    assert done.returncode == 0, done.stderr


def test_silence_ends_with_the_time_out_and_names_the_rank() -> None:
    done = exchange("silent")
    assert done.returncode == 1
    assert "rank 0 waited 2 s for rank 1: nothing came for the backward of microbatch 0 on stage 0" in done.stderr
