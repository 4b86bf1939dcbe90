"""Leave a process group with a collective that never ends, and print a line afterward.

python -m tests.harness.ranks.unfinished_collective FOLDER
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from common.system.processes import kill_with_parent
from common.techniques.elastic import group

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)


def main(folder: Path) -> None:
    child = os.fork()
    store = dist.FileStore(str(folder / "store"), 2)
    is_child = child == 0
    rank = int(is_child)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=COLLECTIVE_TIMEOUT)
    if is_child:
        kill_with_parent()
        signal.pause()
    dist.all_reduce(torch.ones(4), async_op=True)
    group.leave_process_group()
    group.free_left_process_groups()
    os.kill(child, signal.SIGKILL)
    print("left the process group", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
