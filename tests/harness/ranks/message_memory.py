"""Exchange messages between two ranks, for tests/unit/techniques/pipeline/test_stage_messages.py.

    python -m tests.harness.ranks.message_memory memory|network|groups|small|silent|exits|builtin|sockets

With `groups`, each direction has a process group and a first message, as with nccl. With `small`, the size of files and
of shared memory is limited to 100 kB. In the last step, rank 1 sends nothing with `silent`, and exits with `exits`.
`builtin` uses the built-in backend, and `sockets` also sets launch.transport=network.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
import time

import torch

from common.ranks.rendezvous import World
from common.techniques.pipeline.schedules import Action, make_gpipe_schedule
from common.techniques.pipeline.stage_messages import StageMessages, list_routes
from configs.shared import Launch
from tests.harness.ranks.programs import run_on_ranks

SHAPES = [torch.Size([30_000]), torch.Size([2])]


def exchange_messages(mode: str, world: World) -> None:
    """Send activations from rank 0 to rank 1, which returns them plus 1 as gradients."""
    if mode == "small":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    messages = make_messages(mode, world)
    for step in range(3):
        messages.post_receives(2)
        assert not (mode == "groups" and messages.receives), "a receive of nccl is posted when its tensor is needed"
        for microbatch in range(2):
            if world.rank == 0:
                activations = torch.full((4, 30_000), 10.0 * step + microbatch)
                send_and_check_gradients(messages, microbatch, activations)
                continue
            if mode == "silent" and step == 2:
                time.sleep(60)
            if mode == "exits" and step == 2:
                os._exit(0)
            return_gradients(messages, microbatch)
        messages.wait_until_sent()
    world.gather(None)


def make_messages(mode: str, world: World) -> StageMessages:
    routes = list_routes(make_gpipe_schedule(2, 2, 2), SHAPES, 4)
    if mode == "groups":
        world = dataclasses.replace(world, backend="nccl")
    transport = "network" if mode in ("network", "groups") else "auto"
    messages = StageMessages(world, routes, [0, 1], torch.float32, 2, transport)
    assert (messages.memory is not None) == (mode in ("memory", "silent", "exits", "builtin"))
    assert len(set(messages.network.groups.values())) == (4 if mode == "groups" else 0)
    return messages


def send_and_check_gradients(messages: StageMessages, microbatch: int, activations: torch.Tensor) -> None:
    messages.send(Action("F", 1, microbatch), activations)
    gradients = messages.receive(Action("B", 0, microbatch))
    assert gradients is not None
    assert torch.equal(gradients, activations + 1)


def return_gradients(messages: StageMessages, microbatch: int) -> None:
    """Send the received activations plus 1, as a tensor that is not contiguous."""
    activations = messages.receive(Action("F", 1, microbatch))
    assert activations is not None
    messages.send(Action("B", 0, microbatch), activations.t().contiguous().t() + 1)


if __name__ == "__main__":
    mode = sys.argv[1]
    settings = Launch(
        device="cpu",
        backend="builtin" if mode in ("builtin", "sockets") else "auto",
        transport="network" if mode == "sockets" else "auto",
        threads=1,
        step_timeout=2,
    )
    sys.exit(run_on_ranks(lambda world: exchange_messages(mode, world), 2, settings))
