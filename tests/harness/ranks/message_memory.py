"""Exchange messages between two ranks, for tests/unit/techniques/pipeline/test_stage_messages.py.

    python -m tests.harness.ranks.message_memory memory|network|groups|small|silent|gone

With `groups`, each direction has a process group and a first message, as with nccl. With `small`, the size of files and
of shared memory is limited to 100 kB. In the last step, rank 1 sends nothing with `silent`, and exits with `gone`.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
import time

import torch

from common.ranks import local_launcher, rendezvous
from common.ranks.rank_info import RankInfo
from common.techniques.pipeline.schedules import Action, make_gpipe_schedule
from common.techniques.pipeline.stage_messages import StageMessages, list_routes
from configs.shared import Launch

SHAPES = [torch.Size([30_000]), torch.Size([2])]


def exchange(case: str, rank_info: RankInfo) -> None:
    """Send activations from rank 0 to rank 1, which returns them plus 1 as gradients."""
    with rendezvous.join_world(rank_info, Launch(device="cpu", threads=1, step_timeout=2)) as world:
        if case == "small":
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        messages = make_messages(case, world)
        for step in range(3):
            messages.post_receives()
            for microbatch in range(2):
                if world.rank == 0:
                    send_and_check_answer(messages, microbatch, torch.full((4, 30_000), 10.0 * step + microbatch))
                    continue
                if case == "silent" and step == 2:
                    time.sleep(60)
                if case == "gone" and step == 2:
                    os._exit(0)
                answer(messages, microbatch)
            messages.wait_until_sent()
        world.gather(None)


def make_messages(case: str, world: rendezvous.World) -> StageMessages:
    routes = list_routes(make_gpipe_schedule(2, 2, 2), SHAPES, 4)
    if case == "groups":
        world = dataclasses.replace(world, backend="nccl")
    transport = "network" if case in ("network", "groups") else "auto"
    messages = StageMessages(world, routes, torch.float32, 2, transport)
    assert (messages.memory is not None) == (case in ("memory", "silent", "gone"))
    assert len(set(messages.network.groups.values())) == (4 if case == "groups" else 0)
    return messages


def send_and_check_answer(messages: StageMessages, microbatch: int, activations: torch.Tensor) -> None:
    messages.send(Action("F", 1, microbatch), activations)
    gradients = messages.receive(Action("B", 0, microbatch))
    assert gradients is not None
    assert torch.equal(gradients, activations + 1)


def answer(messages: StageMessages, microbatch: int) -> None:
    """Send the received activations plus 1, as a tensor that is not contiguous."""
    activations = messages.receive(Action("F", 1, microbatch))
    assert activations is not None
    messages.send(Action("B", 0, microbatch), activations.t().contiguous().t() + 1)


if __name__ == "__main__":
    sys.exit(local_launcher.run_ranks(lambda rank_info: exchange(sys.argv[1], rank_info), 2, 1, lambda: None))
