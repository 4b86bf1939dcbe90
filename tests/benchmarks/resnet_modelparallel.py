"""What a pipeline gains: training ResNet-50 at 64 px, batch 128, channels_last, 4 microbatches, one thread a stage.

    python tests/benchmarks/resnet_modelparallel.py                about ten minutes on an idle machine
    python tests/benchmarks/resnet_modelparallel.py --rounds 1 model=resnet18 batch=16     only whether it runs

Two stages in two processes, cut by measured cost and as the well-known tutorial cuts (behind layer2), against the naive
split, where one stage works at a time, and against one process with one thread and with two. The bound is what two
equal stages would need if messages took no time: half of what one thread needs for the same microbatches, times
(M + 1) / M. Two cores that work at the same time share the memory's bandwidth: how fast each of them then is, is
measured by two processes that train the whole model, and gives a second bound. Goals stand beside what was measured;
nothing fails because it was slow.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this tree, wherever installed packages point to

import torch
import torch.distributed as dist

from common.core import config, seeds
from common.core.errors import user_errors
from common.data import loader, prepare
from common.data.prepare import Prepared
from common.distributed.rendezvous import World
from common.runs.folder import Folder
from common.training import optimizers
from common.training.run import Run
from configs.resnet_modelparallel import Config
from experiments import resnet_modelparallel as experiment
from tests.benchmarks.learner import QUIET, ROOT, require_same
from tests.benchmarks.measure import Ratio, Report, Row, Samples, Side, Team, at_least, interleave

STEPS = 2  # a turn, after one that does not count
PIECES = 4  # microbatches
TOLERANCE = 1e-3  # of the first losses, which the order of additions changes
IMAGES = ("data.name=generated", "data.image_size=64", "data.samples=384")
SETTINGS = ("model=resnet50", "channels_last=true", "batch=128", "optim.decay=constant", "plot=false", *IMAGES)
SPLIT = {
    "naive": ("mode=naive",),
    "pipelined": ("mode=pipelined", "schedule=gpipe"),
    "1f1b": ("mode=pipelined", "schedule=1f1b"),
    "tutorial's cut": ("mode=pipelined", "schedule=gpipe", "split=[layer3_0]"),
}
WHOLE = {"single": ("mode=single",), "accumulating": ("mode=single", "split_size={piece}")}

BOTH = "accumulating, both cores"


class Bench:
    """The prepared images and a scratch folder."""

    def __init__(self, scratch: Path, extra: Sequence[str]) -> None:
        self.scratch, self.extra = scratch, extra
        self.prepared: Prepared = prepare.prepare(self.settings().data)

    def settings(self, *values: str) -> Config:
        return config.load(Config, [*QUIET, *SETTINGS, f"data.cache={self.scratch}", *self.extra, *values])

    def side(self, name: str, world: World, *values: str) -> Side:
        """The experiment's own training, with its time stamps and its log."""
        piece = self.settings().batch // PIECES
        cfg = self.settings(*(value.format(piece=piece) for value in values))
        path = Folder.create(self.scratch / name, "bench", config.to_yaml(cfg)).claim().path if world.is_main else None
        run = Run(cfg, Folder(world.broadcast(path), 1), world, self.prepared)
        images = loader.Images(self.prepared, "train")
        torch.manual_seed(seeds.derive(cfg.seed, "init"))
        pipe: Any = experiment.build(cfg, images.shape, images.classes, world, run)
        optimizer = optimizers.make(pipe.module.parameters(), cfg.optim)
        batches = list(islice(loader.Loader.from_config(images, cfg, world.device), STEPS + 1))
        run.source, run.total = pipe.last_rank, 10**9
        steps = 0

        def train(some: list[Any]) -> None:
            nonlocal steps
            run.flushed = time.perf_counter()  # so that waiting for the turn does not look like slow steps
            steps = experiment.train_epoch(cfg, pipe, optimizer, cast(Any, some), run, steps, 10**9)

        def turn() -> float:
            train(batches[:1])
            dist.barrier()
            start = time.perf_counter()
            train(batches[1:])
            dist.barrier()
            seconds = (time.perf_counter() - start) / STEPS
            run.flush()
            return seconds

        return turn

    def losses(self, name: str) -> list[float]:
        (path,) = (self.scratch / name).iterdir()
        return [row["loss"] for row in Folder(path).metrics()][: STEPS + 1]

    def cut(self, name: str) -> str:
        """Where a side was cut, as its run found out."""
        (path,) = (self.scratch / name).iterdir()
        return ",".join(config.read_file(path / "config.yaml")["split"])


def shared(taken: Samples, name: str) -> Ratio:
    """The bound where each core is slower while the other works, too: in M - 1 of the M + 1 turns of each direction."""
    sides = (taken.kept(side) for side in ("accumulating", BOTH, name))
    shares = [(2 * alone + (PIECES - 1) * both) / (2 * PIECES) / own for alone, both, own in zip(*sides, strict=True)]
    return Ratio(median(shares), min(shares), max(shares))


def main(rounds: int, extra: Sequence[str]) -> None:
    with user_errors(), tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        bench = Bench(Path(scratch), extra)
        report = Report("resnet_modelparallel", ROOT / "tests" / "benchmarks" / "results")

        def sides(chosen: dict[str, tuple[str, ...]]) -> Callable[[World], dict[str, Side]]:
            return lambda world: {name: bench.side(name, world, *words) for name, words in chosen.items()}

        def two(world: World) -> dict[str, Side]:
            alone = world.part([world.rank])  # each process trains a model of its own: what both cores can do at once
            return sides(SPLIT)(world) | {BOTH: bench.side(f"{BOTH} {world.rank}", alone, *WHOLE["accumulating"])}

        two_threads = {"single, two threads": WHOLE["single"]}
        teams = [Team(2, 1, two), Team(1, 1, sides(WHOLE)), Team(1, 2, sides(two_threads))]
        taken = interleave(teams, rounds=rounds, drop=1)
        for name, like in (("naive", "single"), *((name, "accumulating") for name in list(SPLIT)[1:])):
            require_same(name, bench.losses(name), bench.losses(like), TOLERANCE)
        rows = [
            Row(f"ms/step: {name}", f"{taken.median(name) * 1e3:.0f}", note=f"{median(taken.cores[name]):.1f} cores")
            for name in taken.seconds
        ]
        for name in ("pipelined", "1f1b"):
            bound = taken.ratio("accumulating", name, (PIECES + 1) / PIECES / 2)
            rows += [
                at_least(f"naive / {name}", taken.ratio("naive", name), 1.45),
                at_least(f"share of the bound, {name}", bound, 0.95),
                Row(f"share of the bound of cores that share a memory, {name}", str(shared(taken, name))),
                Row(f"single with one thread / {name}", str(taken.ratio("single", name))),
                Row(f"single with two threads / {name}", str(taken.ratio("single, two threads", name))),
            ]
        rows.append(Row("a core alone / both at work, the same step in each", str(taken.ratio("accumulating", BOTH))))
        note = f"cut at {bench.cut('pipelined')}"
        rows += [
            at_least("the tutorial's cut / the measured one", taken.ratio("tutorial's cut", "pipelined"), 1.12, note)
        ]
        report.section(f"two stages, {PIECES} microbatches: {' '.join([*SETTINGS, *extra])}", rows, {"": taken})
        print(f"\nraw samples: {report.file.relative_to(ROOT)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("settings", nargs="*", help="other settings of the experiment, as key=value")
    asked = parser.parse_args()
    main(asked.rounds, asked.settings)
