"""The executor apart from any experiment: activations in pieces, BatchNorm, and devices it cannot have here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common import launch
from common.config import UserError
from common.launch import Place, choose_device
from configs.shared import Launch
from tests.harness.processes import ROOT, environment

SCRIPT = """
import sys
from collections import OrderedDict
import torch
import torch.nn.functional as F
from torch import nn
from common import launch, processes, splits
from common.pipeline import Pipeline
from common.pipeline_torch import TorchPipeline
from configs.pipeline import Pipeline as Settings
from configs.shared import Launch


class Turn(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)  # the same memory, another order: not contiguous


def model():
    torch.manual_seed(0)
    layers = [Turn(), Turn(), nn.Linear(6, 5), Turn(), nn.BatchNorm1d(5), nn.ReLU(inplace=True), Turn(), Turn()]
    layers += [nn.Linear(7, 4), nn.Flatten(), nn.Linear(20, 3)]
    return nn.Sequential(OrderedDict((f"l{i}", layer) for i, layer in enumerate(layers))).double()


def whole(x, y):
    one = model()
    for part, target in zip(x.chunk(4), y.chunk(4)):  # BatchNorm sees each microbatch, as in a pipeline
        (F.cross_entropy(one(part), target) / 4).backward()
    with torch.no_grad():
        return one, one.eval()(x)


def body(place):
    torch.manual_seed(1)
    x, y = torch.randn(8, 7, 6).double(), torch.randint(3, (8,))
    one, logits = whole(x, y)
    with launch.group(place, Launch(device="cpu")) as world:
        for settings in CASES:
            # the library needs weights in every stage
            four = ["l2", "l5", "l8"] if settings.engine == "own" else ["l3", "l5", "l9"]
            stages = splits.cut(model(), four if settings.stages == 4 else ["l5"])
            engine = Pipeline if settings.engine == "own" else TorchPipeline
            sizes = {"batch": 8, "sample": (7, 6), "dtype": torch.float64}
            pipe = engine(settings, stages, F.cross_entropy, world, **sizes)
            pipe.train()
            begun = []
            pipe.clock.begin = lambda: begun.append(pipe)
            pipe.step(x, y)
            assert len(begun) == 1, (settings, "a clock that is never told of a step loses its precision on a GPU")
            want = dict(one.named_parameters())
            for stage in pipe.local.values():
                for name, parameter in stage.named_parameters():
                    gap = (parameter.grad - want[name].grad).abs().max().item()
                    assert gap < 1e-12, (settings, name, gap)
                for name, buffer in stage.named_buffers():
                    assert torch.allclose(buffer.double(), one.get_buffer(name).double(), atol=1e-12), (settings, name)
            pipe.train(False)
            out = pipe.predict(x, 8)
            assert out is None or torch.allclose(out, logits, atol=1e-12), settings
            world.gather(None)  # nobody leaves before all have received


CASES = [
    Settings(engine=engine, schedule=schedule, stages=2 * each, stages_per_process=each, microbatches=4)
    for engine, schedules in (
        ("own", ("naive", "gpipe", "1f1b")),
        ("torch", ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")),
    )
    for schedule in schedules
    for each in (1, 2)
]
sys.exit(processes.fork_all(body, 2, 1, lambda: None))
"""


def test_pieces_in_memory_and_batchnorm_equal_one_process(tmp_path: Path) -> None:
    """Gradients, running statistics and evaluation, for every engine and schedule."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script)]
    env = environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("gpus", "asked", "processes", "expected"),
    [
        (0, "auto", 2, ("cpu", "gloo")),
        (1, "auto", 2, ("cpu", "gloo")),
        (2, "auto", 2, ("cuda:1", "nccl")),
        (4, "cuda", 2, ("cuda:1", "nccl")),
        (4, "cpu", 2, ("cpu", "gloo")),
        (0, "cuda", 2, "no GPU is visible"),
        (1, "cuda", 2, "2 processes on this host, 1 GPUs"),
    ],
)
def test_a_gpu_each_where_there_are_enough(
    monkeypatch: pytest.MonkeyPatch, gpus: int, asked: str, processes: int, expected: tuple[str, str] | str
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(launch.torch.cuda, "set_device", taken.append)
    place, settings = Place(rank=1, size=processes, local_rank=1, local_size=processes), Launch(device=asked)  # type: ignore[arg-type]
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            choose_device(place, settings)
        return
    device, backend = choose_device(place, settings)
    assert (str(device), backend) == expected
    assert taken == ([1] if device.type == "cuda" else [])
    assert isinstance(device, torch.device)
