"""Communication hooks of DistributedDataParallel: what is sent of a gradient.

No postponed annotations here: DistributedDataParallel looks at those of a hook.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

BYTES = {"fp16": 2, "bf16": 2}  # of one number on the way
WHOLE = 1 << 20  # MB: more than any model, so that there is one bucket


def bucket_mb(communication: str, asked: float, backend: str) -> float:
    """The bucket size to use: PowerSGD with several buckets aborts the process on gloo."""
    return WHOLE if communication == "powersgd" and backend == "gloo" else asked


def register(ddp: DistributedDataParallel, communication: str, rank: int) -> None:
    """Make a wrapped model send its gradients as `communication` says; `rank` is PowerSGD's."""
    match communication:
        case "fp16":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        case "bf16":
            ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
        case "powersgd":
            state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=10)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        case "nothing":
            ddp.register_comm_hook(None, send_nothing)


def send_nothing(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Leave each process its own gradient: wrong for training, the limit to measure against."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
