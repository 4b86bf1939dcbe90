"""Part c of the benchmark: schedules in two processes with one thread each, and the width from which they pay."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch.distributed as dist

from common.distributed.rendezvous import World
from common.runs.folder import Folder
from tests.benchmarks.learner import UNSPLIT, Bench, require_same
from tests.benchmarks.measure import Row, Samples, Side, Team, at_least, interleave

WIDE = "depth=2"
TOLERANCE = 1e-3  # of losses that differ by the order of additions, after 30 steps


def going(bench: Bench, world: World, steps: int, name: str, *values: str) -> Side:
    """A side that trains on where it stopped, `steps` steps a turn, after two that do not count."""
    learner = bench.learner(world, f"c-{name}", *values)
    batches = learner.ends(bench.batches(learner.cfg, steps + 2))

    def side() -> float:
        learner.run.flushed = time.perf_counter()  # so that waiting for the turn does not look like slow steps
        learner.train(batches[:2])
        dist.barrier()
        start = time.perf_counter()
        learner.train(batches[2:])
        dist.barrier()
        seconds = (time.perf_counter() - start) / steps
        learner.run.flush()
        return seconds

    return side


def schedules(bench: Bench, title: str, steps: int, rounds: int, pair: dict[str, str], *values: str) -> Samples:
    """Pipelines in two processes beside the unsplit model with one thread and with two; losses are compared."""
    many = next(value for value in values if value.startswith("microbatches="))

    def sides(chosen: dict[str, tuple[str, ...]]) -> Callable[[World], dict[str, Side]]:
        return lambda world: {
            name: going(bench, world, steps, f"{title}-{name}", *values, *extra) for name, extra in chosen.items()
        }

    split = {name: ("stages=2", *words.split()) for name, words in pair.items()}
    one = {"unsplit, 1 thread": UNSPLIT, "accumulating, 1 thread": ("stages=1", many, "schedule=naive")}
    teams = [
        Team(2, 1, sides(split)),
        Team(1, 1, sides(one)),
        Team(1, 2, sides({"unsplit, 2 threads": UNSPLIT})),
    ]
    taken = interleave(teams, rounds=rounds, drop=1)
    losses = {name: losses_of(bench.scratch / f"c-{title}-{name}") for name in taken.seconds}
    for name, found in losses.items():
        require_same(f"{title}: {name}", found, losses["accumulating, 1 thread"], TOLERANCE)
    return taken


def losses_of(runs: Path) -> list[float]:
    (path,) = runs.iterdir()
    return [row["loss"] for row in Folder(path).metrics()][:30]


def time_rows(taken: Samples) -> list[Row]:
    return [
        Row(f"ms/step: {name}", f"{taken.median(name) * 1e3:.2f}", note=f"{median(taken.cores[name]):.1f} cores busy")
        for name in taken.seconds
    ]


def part_c(bench: Bench) -> None:
    own = {f"own {name}": f"schedule={name}" for name in ("naive", "gpipe", "1f1b")}
    both = own | {name.replace("own", "torch"): f"{words} engine=torch" for name, words in own.items()}
    small = schedules(bench, "small", 80, 6, both, "microbatches=4")
    rows = time_rows(small)
    for name in ("naive", "gpipe", "1f1b"):
        rows.append(at_least(f"torch {name} / own {name}", small.ratio(f"torch {name}", f"own {name}"), 3))
    for threads in ("1 thread", "2 threads"):
        against = f"unsplit, {threads}"
        rows.append(Row(f"{against} / own 1f1b (above 1 the pipeline pays)", str(small.ratio(against, "own 1f1b"))))
    head = "two processes with one thread each, 4 microbatches, losses equal"
    bench.report.section(f"c  width 128, batch 64 (the original size): {head}", rows, {"": small})
    del both["torch naive"]
    wide = schedules(bench, "wide", 8, 7, both, "microbatches=4", "width=1024", "batch=1024", WIDE)
    bench.report.section(f"c  width 1024, batch 1024, {WIDE}: {head}", time_rows(wide) + wide_rows(wide, 4), {"": wide})
    sweep(bench)


def wide_rows(taken: Samples, m: int) -> list[Row]:
    rows = []
    for name in ("gpipe", "1f1b"):
        rows.append(at_least(f"torch {name} / own {name}", taken.ratio(f"torch {name}", f"own {name}"), 1.1))
    for name in ("own gpipe", "own 1f1b"):
        ideal = f"ideal {2 * m / (m + 1):.2f}"
        rows.append(at_least(f"unsplit, 1 thread / {name}", taken.ratio("unsplit, 1 thread", name), 1.3, ideal))
        rows.append(Row(f"unsplit, 2 threads / {name}", str(taken.ratio("unsplit, 2 threads", name))))
        bound = taken.ratio("accumulating, 1 thread", name, (m + 1) / (2 * m))
        rows.append(at_least(f"{name}: share of the bound T_accumulate / 2 * (M + 1) / M", bound, 0.8))
    return rows


def sweep(bench: Bench) -> None:
    """From which width on two processes beat one."""
    for batch in (64, 1024):
        rows, samples, pays = [], {}, dict[str, str]()
        for width in (64, 128, 256, 512, 1024, 2048):
            steps = max(3, min(40, 2**21 // (width * batch)))
            values = (f"width={width}", f"batch={batch}", "microbatches=4")
            taken = schedules(bench, f"sweep-{batch}-{width}", steps, 4, {"own 1f1b": "schedule=1f1b"}, *values)
            samples[str(width)] = taken
            words = []
            for threads in ("1 thread", "2 threads"):
                ratio = taken.ratio(f"unsplit, {threads}", "own 1f1b")
                words.append(f"{threads} {ratio}")
                if ratio.median > 1:
                    pays.setdefault(threads, f"{threads}: from width {width}")
            rows.append(Row(f"width {width}: unsplit / own 1f1b", "   ".join(words), note=taken.rounds))
        found = [pays.get(threads, f"{threads}: at no width here") for threads in ("1 thread", "2 threads")]
        rows.append(Row("pays against the unsplit model with", ", ".join(found)))
        bench.report.section(f"c  when does the pipeline pay? depth 2, batch {batch}", rows, samples)
