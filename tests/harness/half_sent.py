"""A rank is killed while it sends another one 64 MB; prints the error by which that one notices.

python -m tests.harness.half_sent FOLDER
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from common.ranks import objects

SIZE = 64 << 20
TIMEOUT = datetime.timedelta(seconds=12)


def send_from_1(folder: Path, rank: int) -> None:
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    objects.broadcast_bytes(bytes(SIZE if rank else 0), 1, torch.device("cpu"))


def count_written(process: int) -> int:
    """Bytes that a process has written to files and sockets."""
    return int(Path(f"/proc/{process}/io").read_text().split("wchar:")[1].split()[0])


if __name__ == "__main__":
    folder, receiver = Path(sys.argv[1]), os.getpid()
    source = os.fork()
    if source == 0:
        send_from_1(folder, 1)
        time.sleep(60)
    if os.fork() == 0:
        while count_written(source) < SIZE // 4:
            time.sleep(0.0005)
        os.kill(source, signal.SIGKILL)
        os._exit(0)
    try:
        send_from_1(folder, 0)
        print("it came")
    except RuntimeError as error:
        print(error)
