"""Kill rank 1 while it sends 64 MB to rank 0, and print the error on rank 0.

python -m tests.harness.ranks.interrupted_message FOLDER
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

MESSAGE_BYTES = 64 << 20
TIMEOUT = datetime.timedelta(seconds=12)


def broadcast_from_rank_1(folder: Path, rank: int) -> None:
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    objects.broadcast_bytes(bytes(MESSAGE_BYTES if rank else 0), 1, torch.device("cpu"))


def count_written_bytes(process: int) -> int:
    """Return the number of bytes that a process has written to files and sockets."""
    return int(Path(f"/proc/{process}/io").read_text().split("wchar:")[1].split()[0])


def interrupt_message(writer: int, target: int, signal_number: int, bytes_before: int = 0) -> None:
    """Send a signal to `target` when `writer` has written `bytes_before` bytes and a quarter of the message."""
    while count_written_bytes(writer) < bytes_before + MESSAGE_BYTES // 4:
        time.sleep(0.0005)
    os.kill(target, signal_number)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sender = os.fork()
    if sender == 0:
        broadcast_from_rank_1(folder, 1)
        time.sleep(60)
    if os.fork() == 0:
        interrupt_message(sender, sender, signal.SIGKILL)
        os._exit(0)
    try:
        broadcast_from_rank_1(folder, 0)
        print("received everything")
    except RuntimeError as error:
        print(error)
