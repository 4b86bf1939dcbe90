"""Three steps of messages between two processes, for tests/unit/techniques/pipeline/test_stage_messages.py.

    python -m tests.harness.exchange memory|network|groups|small|silent|gone

With `groups` each direction has a process group and a first message, as on nccl; with `small` the files of a process,
which its shared memory is too, may hold next to nothing; with `silent` one process says nothing in the last step, with
`gone` it ends there.
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


def exchange(what: str, place: RankInfo) -> None:
    with rendezvous.join_world(place, Launch(device="cpu", threads=1, step_timeout=2)) as world:
        if what == "small":
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        found = list_routes(make_gpipe_schedule(2, 2, 2), SHAPES, 4)
        shown = dataclasses.replace(world, backend="nccl") if what == "groups" else world
        messages = StageMessages(shown, found, torch.float32, 2, "network" if what in ("network", "groups") else "auto")
        assert (messages.memory is not None) == (what in ("memory", "silent", "gone"))
        assert len(set(messages.network.groups.values())) == (4 if what == "groups" else 0)
        for step in range(3):
            messages.post_receives()
            for m in range(2):
                value = torch.full((4, 30_000), 10.0 * step + m)
                if world.rank == 0:
                    messages.send(Action("F", 1, m), value)
                    answer = messages.receive(Action("B", 0, m))
                    assert answer is not None and torch.equal(answer, value + 1)
                else:
                    if what == "silent" and step == 2:
                        time.sleep(60)
                    if what == "gone" and step == 2:
                        os._exit(0)
                    given = messages.receive(Action("F", 1, m))
                    assert given is not None
                    messages.send(Action("B", 0, m), given.t().contiguous().t() + 1)
            messages.wait_until_sent()
        world.gather(None)


if __name__ == "__main__":
    sys.exit(local_launcher.run_ranks(lambda place: exchange(sys.argv[1], place), 2, 1, lambda: None))
