"""Benchmarks within a budget of minutes, recorded after each round.

    make bench                                   all, in this order, until the budget is used up
    make bench NAME=ddp_multinode MINUTES=10     the parts of one experiment or topic
    make bench NAME=ddp_multinode/step           one part

Every round is added to one JSON of this machine and day in tests/benchmarks/results/. The same command continues an
interrupted benchmark: it adds the missing rounds and leaves out complete parts. If all parts are complete or the code
has changed, they are measured again. A disturbed round is replaced. The last table shows what was measured, the goal,
and whether it was met. Nothing fails because it was slow. `make tables` shows what is committed in
tests/benchmarks/recorded/; tables.py publishes a JSON there.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common.config import config
from common.system.errors import UserError, exit_on_user_error
from common.system.text import format_count
from tests.benchmarks import records
from tests.benchmarks.measure import Pace, Samples, interleave
from tests.benchmarks.parts import Part
from tests.benchmarks.records import Record
from tests.harness.experiments.discovery import import_experiment_modules

FAILURES = (RuntimeError, AssertionError, OSError, KeyError, ValueError, subprocess.SubprocessError, SystemExit)


def all_parts() -> list[Part]:
    """Return the parts of all experiments, in the order of their names, and those of the other topics.

    An experiment that has no module of its own here is measured with one rank and with two.
    """
    from tests.benchmarks import checkpoint, growth, optimizers, ranks, tools, tracking

    declared = import_experiment_modules("tests.benchmarks.{}")
    parts: list[Part] = []
    for name in config.list_experiments():
        parts += declared[name].PARTS if name in declared else [ranks.make_part(name)]
    for module in (optimizers, checkpoint, tracking, tools, growth):
        parts += module.PARTS
    return parts


def choose_parts(names: Sequence[str]) -> list[Part]:
    """Return the parts with these names, or of these experiments; all without names. Raises UserError."""
    parts = all_parts()
    if not names:
        return parts
    chosen_parts: list[Part] = []
    for name in names:
        matches = [part for part in parts if name in (part.name, part.name.partition("/")[0])]
        if not matches:
            raise UserError(f"NAME={name}: no such benchmark; {suggest_name(name, parts)}")
        chosen_parts += matches
    return chosen_parts


def suggest_name(name: str, parts: Sequence[Part]) -> str:
    """Return a question with the most similar name or, if no name is similar, a list of all names."""
    topics = list(dict.fromkeys(part.name.partition("/")[0] for part in parts))
    part_names = [part.name for part in parts]
    similar = difflib.get_close_matches(name, [*topics, *part_names], n=1)
    if similar:
        return f"did you mean {similar[0]}?"
    return f"there are {', '.join(topics)}, and parts of these: {', '.join(part_names)}"


def make_pace(part: Part, rounds: int, seconds: float) -> Pace:
    """Return the pace of a part with `rounds` rounds, or with its own number of rounds for 0."""
    return Pace(rounds or part.rounds, part.drop, seconds, replaces_disturbed=True)


def count_missing_rounds(part: Part, record: Record, rounds: int) -> int:
    """Return how many rounds of a part are missing in the record."""
    return make_pace(part, rounds, 0).count_missing(record.find_samples(part.name))


def measure(part: Part, record: Record, seconds: float, rounds: int, earlier: Samples, scratch: Path) -> Samples:
    """Measure one part, in addition to earlier rounds; its record is written after each round.

    `scratch` is an empty folder for temporary files.
    """
    print(f"\n{part.name}: {part.title}", flush=True)
    if earlier.rounds:
        print(f"  {format_count(earlier.rounds, 'earlier round')}", flush=True)
    origin = {"title": part.title, "command": f"make bench NAME={part.name}", "facts": list(part.facts)}

    def keep(samples: Samples) -> None:
        part.check(scratch, samples)
        content = origin | {"round_seconds": round(pace.last, 1)} | part.attachments(scratch)
        record.put(part.name, content, samples, part.table(samples))

    pace = make_pace(part, rounds, seconds)
    return interleave(part.sides(scratch), pace, keep, earlier)


def describe_missing_rounds(parts: Sequence[Part], record: Record, rounds: int) -> str:
    """Return how many parts are incomplete, and about how long they will take. Without incomplete parts, empty."""
    seconds = 0.0
    started_count = 0
    new_count = 0
    for part in parts:
        missing = count_missing_rounds(part, record, rounds)
        round_seconds = record.content["parts"].get(part.name, {}).get("round_seconds")
        if missing and round_seconds is not None:
            started_count += 1
            seconds += missing * round_seconds
        elif missing:
            new_count += 1
    phrases = []
    if started_count:
        duration = format_count(max(1, math.ceil(seconds / 60)), "minute")
        phrases.append(f"{format_count(started_count, 'part')} incomplete (about {duration} left)")
    if new_count:
        phrases.append(f"{format_count(new_count, 'part')} not measured yet")
    if not phrases:
        return ""
    remedy = "to continue, repeat the command"
    if not record.is_resumable:
        remedy = "the command continues only at a commit without uncommitted changes"
    return f"{', '.join(phrases)}; {remedy}"


def print_summary(record: Record, left_out: dict[str, str]) -> None:
    """Print one table: what was measured, the goal, met or missed."""
    lines = [["part", "measured", "value", "goal"]]
    for name in record.written:
        part = record.content["parts"][name]
        disturbed = records.is_disturbed(part)
        for row in part["table"]["rows"]:
            cells = "  ".join(map(records.text_of, row["cells"]))
            lines.append([name, row["what"], cells, records.goal_of(row, disturbed)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print()
    for line in lines:
        padded = [f"{text:<{width}}" for text, width in zip(line, widths, strict=True)]
        print("  ".join(padded).rstrip())
    for name, reason in left_out.items():
        print(f"not measured: {name}: {reason}")
    print(f"every sample: {os.path.relpath(record.path)}")


def main(names: Sequence[str], minutes: float, rounds: int, folder: Path) -> int:
    """Measure the parts and print the results; return the exit status."""
    parts = choose_parts(names)
    record = Record(folder)
    deadline = time.monotonic() + 60 * minutes
    machine = record.content["machine"]
    torch_version = record.content["versions"]["torch"]
    print(f"{machine['cpu']}, {machine['cores']} cores, torch {torch_version}; budget {minutes:g} minutes")
    measurable = [part for part in parts if not part.missing()]
    left_out = {part.name: part.missing() for part in parts if part not in measurable}
    incomplete = [part for part in measurable if count_missing_rounds(part, record, rounds)]
    chosen = incomplete or measurable
    if chosen and not incomplete:
        print("all parts are complete; measuring them again")
    status = 0
    try:
        # One folder for all parts, because the deletion of many files slows down the next runs; see `discard_run`.
        with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as scratch:
            for number, part in enumerate(chosen):
                seconds_left = deadline - time.monotonic()
                earlier = record.find_samples(part.name) if incomplete else Samples()
                if seconds_left <= 0:
                    left_out[part.name] = f"the budget was used up; make bench NAME={part.name}"
                    continue
                part_folder = Path(scratch) / str(number)  # short, because a local cluster limits its path
                try:
                    part_folder.mkdir()
                    measure(part, record, seconds_left / (len(chosen) - number), rounds, earlier, part_folder)
                except FAILURES as error:  # the other parts are measured all the same
                    left_out[part.name] = f"failed: {error}"
                    status = 1
    except KeyboardInterrupt:
        status = 130
    print_summary(record, left_out)
    if message := describe_missing_rounds(measurable, record, rounds):
        print(message)
    return status


def parse_budget(minutes: str, rounds: str) -> tuple[float, int]:
    """Return the budget in minutes and the rounds of each part, 0 for its own number. Raises UserError."""
    try:
        budget = float(minutes or 5)
    except ValueError:
        budget = 0.0
    if not 0 < budget < math.inf:
        raise UserError(f"MINUTES={minutes}: give a number of minutes above 0, such as MINUTES=5")
    if rounds and not rounds.isdecimal():
        raise UserError(f"--rounds={rounds}: give a number of rounds, such as --rounds=3")
    return budget, int(rounds or 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", default="", help="budget of the whole command in minutes (default 5)")
    parser.add_argument("--rounds", default="", help="rounds of each part (default: each part's own number)")
    parser.add_argument("--folder", type=Path, default=records.RESULTS, help="where the JSON is written")
    parser.add_argument("names", nargs="*", help="experiments, topics or parts; none measures all")
    arguments = parser.parse_args()
    names = " ".join(arguments.names).split()
    with exit_on_user_error():
        minutes, rounds = parse_budget(arguments.minutes, arguments.rounds)
        sys.exit(main(names, minutes, rounds, arguments.folder))
