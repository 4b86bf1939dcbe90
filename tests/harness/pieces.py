"""Small models with activations in pieces and BatchNorm, trained by every engine and schedule in two processes.

python -m tests.harness.pieces      ends with status 0 if gradients, buffers and evaluation equal one process's
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.ranks import local_launcher, rendezvous
from common.ranks.rank_info import RankInfo
from common.techniques.pipeline import partition
from common.techniques.pipeline.executor import PipelineEngine
from common.techniques.pipeline.torch_engine import TorchPipelineEngine
from configs.pipeline import PipelineConfig as Settings
from configs.shared import Launch


class Turn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)  # the same memory, another order: not contiguous


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [Turn(), Turn(), nn.Linear(6, 5), Turn(), nn.BatchNorm1d(5), nn.ReLU(inplace=True), Turn(), Turn()]
    layers += [nn.Linear(7, 4), nn.Flatten(), nn.Linear(20, 3)]
    return nn.Sequential(OrderedDict((f"l{i}", layer) for i, layer in enumerate(layers))).double()


def whole(x: Tensor, y: Tensor) -> tuple[nn.Sequential, Tensor]:
    one = model()
    for part, target in zip(x.chunk(4), y.chunk(4), strict=True):  # BatchNorm sees each microbatch, as in a pipeline
        (F.cross_entropy(one(part), target) / 4).backward()
    with torch.no_grad():
        return one, one.eval()(x)


CASES = [
    Settings(engine=engine, schedule=schedule, stages=2 * each, stages_per_process=each, microbatches=4)  # type: ignore[arg-type]
    for engine, schedules in (
        ("own", ("naive", "gpipe", "1f1b")),
        ("torch", ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")),
    )
    for schedule in schedules
    for each in (1, 2)
]


def compare(place: RankInfo) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(8, 7, 6).double(), torch.randint(3, (8,))
    one, logits = whole(x, y)
    want = dict(one.named_parameters())
    with rendezvous.join_world(place, Launch(device="cpu", threads=1)) as world:
        for settings in CASES:
            # the library needs weights in every stage
            four = ["l2", "l5", "l8"] if settings.engine == "own" else ["l3", "l5", "l9"]
            stages = partition.split_into_stages(model(), four if settings.stages == 4 else ["l5"])
            engine = PipelineEngine if settings.engine == "own" else TorchPipelineEngine
            pipe = engine(settings, stages, F.cross_entropy, world, batch=8, sample=(7, 6), dtype=torch.float64)
            pipe.module.train()
            begun: list[PipelineEngine] = []
            pipe.clock.refresh_reference_event = partial(begun.append, pipe)  # type: ignore[method-assign]
            pipe.step(x, y)
            assert len(begun) == 1, (settings, "a clock that is never told of a step loses its precision on a GPU")
            for stage in pipe.local_stages.values():
                for name, parameter in stage.named_parameters():
                    mine, theirs = parameter.grad, want[name].grad
                    assert mine is not None and theirs is not None
                    gap = (mine - theirs).abs().max().item()
                    assert gap < 1e-12, (settings, name, gap)
                for name, buffer in stage.named_buffers():
                    assert torch.allclose(buffer.double(), one.get_buffer(name).double(), atol=1e-12), (settings, name)
            pipe.module.eval()
            out = pipe.predict(x, 8)
            assert out is None or torch.allclose(out, logits, atol=1e-12), settings
            world.gather(None)  # nobody leaves before all have received


if __name__ == "__main__":
    sys.exit(local_launcher.run_ranks(compare, 2, 1, lambda: None))
