"""Run an experiment whose ranks share the GPUs of this machine, so that one GPU suffices for any number of ranks.

    python -m tests.harness.gpu.shared_gpu experiments/ddp_multinode.py launch.device=cuda key=value ...

NCCL does not allow two ranks on the same host to share a GPU. Each rank sets the variable NCCL_HOSTID to a different
value. NCCL then treats each rank as if it were alone on its host, and sends messages through sockets on the loopback
interface. All other code is the same as with one GPU per rank.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch

from common.ranks import rendezvous
from common.ranks.rank_info import RankInfo
from configs.shared import Launch


def choose_shared_gpu(rank_info: RankInfo, settings: Launch) -> tuple[torch.device, str]:
    """Return a GPU, which other ranks may also use, and nccl. Without `launch.device=cuda`, return the CPU and gloo."""
    if settings.device != "cuda":
        return torch.device("cpu"), "gloo"
    os.environ["NCCL_HOSTID"] = f"rank-{rank_info.rank}"
    index = rank_info.local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index), "nccl"


if __name__ == "__main__":
    rendezvous.choose_device_and_backend = choose_shared_gpu
    rendezvous.check_gpus = lambda ranks, gpus: None
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
