"""What mnist_pipeline costs, beside others and beside its limits.

    python tests/benchmarks/mnist_pipeline.py          all parts, about five minutes
    python tests/benchmarks/mnist_pipeline.py a c      some of them

a  images: the in-memory loader, torchvision's transforms in a DataLoader, one fixed batch
b  the loop of the unsplit model: bare PyTorch, Lightning, Fabric, Accelerate on the same tensors
c  schedules in two processes with one thread each: this engine, torch's, the unsplit model, the bound
d  seconds of training to 97.5 % test accuracy on real MNIST
e  from the command to the first row of metrics on disk

Real MNIST is taken from DATA_ROOT or data/, else the built-in digits. Goals stand beside what was measured;
nothing fails because it was slow. Raw samples go to tests/benchmarks/results/.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this tree, wherever installed packages point to

import torch
from torch import Tensor

from common.core.errors import user_errors
from common.data import loader as data
from common.distributed.rendezvous import World
from common.training import optimizers
from tests.benchmarks import peers
from tests.benchmarks.learner import ROOT, UNSPLIT, Batch, Bench, require_same, weights
from tests.benchmarks.measure import Row, Samples, Side, Team, at_least, at_most, interleave
from tests.benchmarks.mnist_pipeline_commands import part_d, part_e
from tests.benchmarks.mnist_pipeline_schedules import part_c

TOLERANCE = 1e-3  # of weights that differ by the rounding of the normalisation, after training

# ---- a: images


class PilImages(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Samples as torchvision.datasets.MNIST gives them: a PIL image each, then the transforms."""

    def __init__(self, images: data.Images) -> None:
        from torchvision import transforms

        self.images, self.labels = images.images, images.labels
        steps = [transforms.ToTensor(), transforms.Normalize((images.mean,), (images.std,))]
        self.transform = transforms.Compose(steps)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        image, label = self.images[index], int(self.labels[index])
        return self.transform(Image.fromarray(image.numpy())), label


def part_a(bench: Bench) -> None:
    few = 200

    def sides(world: World) -> dict[str, Side]:
        cfg = bench.settings(*UNSPLIT)
        order = data.draw_order(len(bench.images), cfg.seed, 0)[: few * cfg.batch].tolist()

        def pil(workers: int) -> Any:
            options = {"batch_size": cfg.batch, "sampler": order, "num_workers": workers}
            return torch.utils.data.DataLoader(PilImages(bench.images), persistent_workers=workers > 0, **options)

        def ours() -> data.Loader:
            block = cfg.data.block
            return data.Loader(bench.images, cfg.batch, cfg.seed, world.device, torch.float32, block=block)

        slow = {f"workers {n}": pil(n) for n in (0, 2)}
        steps = len(bench.images) // cfg.batch
        fixed = bench.batches(cfg, 1) * steps
        expected: list[float] = []

        def timed(name: str, batches: Callable[[], Any], total: int, same: bool = True) -> Side:
            def side() -> float:
                learner = bench.learner(world, f"a-{name}", *UNSPLIT, total=total)
                start = time.perf_counter()
                learner.train(batches())
                seconds = (time.perf_counter() - start) / total
                if same:
                    found = weights(learner.pipe.module)
                    expected[:] = expected or found
                    require_same(name, found, expected, TOLERANCE)
                return seconds

            return side

        return {
            "ours": timed("ours", ours, few),
            **{name: timed(name, lambda loader=loader: loader, few) for name, loader in slow.items()},  # type: ignore[misc]
            "ours, epoch": timed("epoch", ours, steps, same=False),
            "fixed batch": timed("fixed", lambda: fixed, steps, same=False),
        }

    taken = interleave([Team(1, 2, sides)], rounds=8)
    rows = [Row(f"images/s training: {name}", f"{64 / taken.median(name):,.0f}") for name in taken.seconds]
    rows += [
        at_least("ours / PIL transforms, DataLoader", taken.ratio("workers 0", "ours"), 6),
        Row("ours / the same with 2 workers", str(taken.ratio("workers 2", "ours"))),
        at_least("ours / one fixed batch (the limit)", taken.ratio("fixed batch", "ours, epoch"), 0.8),
    ]
    bench.report.section(f"a  loader: batch 64, two threads, {few} steps of the slow sides", rows, {"": taken})


# ---- b: the loop


class Stamped:
    """Batches that note when they were asked for; the time of a step is read off in the steady part."""

    def __init__(self, batches: list[Batch], warm: int = 50) -> None:
        self.batches, self.warm = batches, warm

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self.batches):
            if number == self.warm:
                self.start = time.perf_counter()
            self.end = time.perf_counter()
            yield batch

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / (len(self.batches) - 1 - self.warm)


def part_b(bench: Bench) -> None:
    steps = 600

    def sides(world: World, chosen: Mapping[str, peers.Peer | None]) -> dict[str, Side]:
        cfg = bench.settings(*UNSPLIT)
        batches = bench.batches(cfg, steps)
        rates = [optimizers.rate(cfg.optim, step, steps) for step in range(steps)]
        expected: list[float] = []

        def timed(name: str, peer: peers.Peer | None) -> Side:
            def side() -> float:
                learner, stamped = bench.learner(world, f"b-{name}", *UNSPLIT, total=steps), Stamped(batches)
                model = learner.pipe.module[0]
                if peer is None:
                    learner.train(stamped)
                else:
                    peer(model, cast(peers.Batches, stamped), rates, cfg.optim)
                found = weights(model)
                expected[:] = expected or found
                require_same(name, found, expected, 1e-6)
                return stamped.seconds

            return side

        return {name: timed(name, peer) for name, peer in chosen.items()}

    def taken_of(rounds: int, **peers_of: peers.Peer | None) -> Samples:
        return interleave([Team(1, 2, lambda world: sides(world, peers_of))], rounds=rounds, drop=2)

    # the loops proper are so close that they get more rounds
    close = taken_of(24, ours=None, bare=peers.bare, bare_light=peers.bare_light)
    wide = taken_of(
        6, ours=None, fabric=peers.fabric, accelerate=peers.accelerate, lean=peers.trainer_lean, trainer=peers.trainer
    )
    names = {"ours": "ours, every loss on disk", "bare": "bare loop, nothing logged"}
    names |= {"bare_light": "bare loop with our optimizer", "fabric": "Fabric", "accelerate": "Accelerate"}
    names |= {"trainer": "Lightning Trainer", "lean": "Lightning Trainer, nothing logged, no scheduler"}
    rows = [
        Row(f"us/step: {name}", f"{(close if key in close.seconds else wide).median(key) * 1e6:.0f}")
        for key, name in names.items()
    ]
    rows.append(at_most("ours / bare loop", close.ratio("ours", "bare"), 1.05, close.rounds))
    rows.append(Row(f"ours / {names['bare_light']}", str(close.ratio("ours", "bare_light"))))
    rows.append(at_least("Lightning Trainer / ours", wide.ratio("trainer", "ours"), 2.3, wide.rounds))
    rows += [Row(f"{names[key]} / ours", str(wide.ratio(key, "ours"))) for key in ("lean", "accelerate", "fabric")]
    title = "b  loop of the unsplit model: batch 64, two threads, same tensors; final weights equal"
    bench.report.section(title, rows, {"close": close, "peers": wide})


PARTS = {"a": part_a, "b": part_b, "c": part_c, "d": part_d, "e": part_e}


def main(names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        sys.exit(f"error: no part {unknown[0]!r}; parts are {' '.join(PARTS)}")
    os.chdir(ROOT)
    with user_errors(), tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        bench = Bench(Path(scratch))
        for name in names or PARTS:
            PARTS[name](bench)
        print(f"\nraw samples: {bench.report.file.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
