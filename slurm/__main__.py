"""The command line of the project: `python -m slurm VERB`. Every target of the Makefile with settings is such a verb.

    python -m slurm --help           the verbs
    python -m slurm exp --help       the settings of one of them
    python -m slurm --make exp       the same, with the variables of make's command line as settings

A verb imports only what it needs, and never torch before it has to.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from common.core.errors import UserError, exit_on_user_error
from slurm.arguments import split_words, suggest_nearest


class Setting(NamedTuple):
    """One setting of a verb: a variable of make, and an option or an argument of this command line."""

    variable: str
    """Its name in make; empty where make has no such variable."""
    option: str
    """Such as `--nodes`; without dashes a positional argument."""
    help: str


class Verb(NamedTuple):
    """A verb: the module whose `main` carries it out, its help, and its settings."""

    module: str
    help: str
    settings: tuple[Setting, ...] = ()


NAME = Setting("NAME", "name", "experiment: the name of a file in experiments/, such as mnist_pipeline")
RUN = Setting("RUN", "run", "id of a run, the last four characters of one, or the path of a run folder")
NODES = Setting("NODES", "--nodes", "number of hosts (1)")
ARGS = Setting("ARGS", "--args", 'settings of the experiment, and of the cluster as cluster.key=value: "key=value ..."')
LAUNCH = Setting(
    "LAUNCH",
    "--launch",
    "local, slurm, slurm:NAME for a local cluster, or auto: a local cluster, else SLURM, else this machine (auto)",
)
CLUSTER = Setting("CLUSTER", "--cluster", "profile of the site: the name of a file in configs/cluster/ (default)")
FOLLOW = Setting("FOLLOW", "--follow", "1: show the log of rank 0 until the end")
DRY_RUN = Setting("DRY_RUN", "--dry-run", "1: show what would be done, and do nothing")
JSON = Setting("JSON", "--json", "1: print JSON for programs")
RUNS_FOLDER = Setting("", "--runs-folder", "folder that holds the runs (runs)")
CHOICE = (
    Setting("RUNS", "--runs", 'runs by id, the last four characters of one, or path: "ID ID ..."'),
    Setting("NAME", "--name", "runs of this experiment"),
    Setting("LAST", "--last", "number of runs, the newest"),
    Setting("WHERE", "--where", 'runs with these settings: "strategy=ddp optim.lr>=0.01"'),
)
SWEEP = Setting("SWEEP", "--sweep", "runs of this sweep: its name, or its folder")
CLUSTER_NAME = Setting("NAME", "--name", "name of the local cluster (local)")

VERBS = {
    "exp": Verb("slurm.launch.submit", "run an experiment here or on a cluster, or resume a run", (
        NAME, NODES, ARGS, LAUNCH, CLUSTER, FOLLOW, DRY_RUN,
        Setting("STRICT", "--strict", "1: refuse a checkout with changes that are not committed"),
        Setting("RESUME", "--resume", "run to resume from its newest checkpoint, instead of a new run of NAME"))),
    "new-experiment": Verb("slurm.launch.new_experiment", "write the files of a new experiment that trains as it is", (
        Setting("NAME", "name", "name of the new experiment, such as my_mlp"),)),
    "check-optimizer": Verb("slurm.launch.check_optimizer", "try an optimizer of one's own before a run does", (
        Setting("FILE", "file", "its file and class, such as lion.py:Lion; also a name that optim.name has"),)),
    "rerun": Verb("slurm.launch.rerun", "repeat a run from its own settings and source, and compare to the bit", (
        RUN, ARGS, LAUNCH, CLUSTER)),
    "evaluate": Verb("slurm.reports.trained_model", "measure the trained model of a finished run again", (
        RUN, Setting("ARGS", "--args", 'other samples: "data.root=... data.test_limit=1000"; also eval_batch, log.*'))),
    "export": Verb("slurm.reports.trained_model", "write the trained model for other programs", (
        RUN, Setting("FORMAT", "--format", "safetensors, torch.export or onnx (safetensors)"))),
    "sweep": Verb("slurm.launch.sweep", "run every point of a grid that has no run yet", (
        Setting("GRID", "grid", "file of the sweep, such as configs/sweeps/mnist_pipeline_rates.yaml"),
        ARGS, LAUNCH, CLUSTER,
        Setting("FAILED", "--failed", "1: start the failed points anew, with the source as it is now"),
        FOLLOW, DRY_RUN)),
    "doctor": Verb("slurm.reports.doctor", "check every host before a long job, or find why a run failed or hangs", (
        NODES, Setting("ARGS", "--args", "runs, data.cache and launch.mixed of the job, and cluster.key=value"),
        LAUNCH, CLUSTER, Setting("RUN", "--run", "run to examine, instead of hosts"), JSON)),
    "status": Verb("slurm.reports.status", "list the state of the newest runs, or of one", (
        RUN, Setting("WAIT", "--wait", "seconds to wait for the end of the run"),
        Setting("ALL", "--all", "1: list all runs, as JSON=1 does, not only the newest 20"), JSON, RUNS_FOLDER)),
    "logs": Verb("slurm.reports.logs", "print the log of rank 0 of a run", (RUN, FOLLOW, RUNS_FOLDER)),
    "cancel": Verb("slurm.reports.cancel", "end a run; it saves a checkpoint first", (RUN, RUNS_FOLDER)),
    "compare": Verb("slurm.reports.compare", "set runs side by side, as a table and as a page for a browser", (
        *CHOICE, SWEEP, Setting("PAGE", "--page", "file of the page (runs/compare.html)"), JSON, RUNS_FOLDER)),
    "sync": Verb("slurm.reports.wandb_sync", "send runs that were tracked offline to W&B", (
        *CHOICE, SWEEP, DRY_RUN, RUNS_FOLDER)),
    "dashboard": Verb("slurm.reports.wandb_dashboard", "make the W&B workspace for comparing runs", (
        Setting("PROJECT", "--project", "project of W&B, or entity/project"), DRY_RUN)),
    "leet": Verb("slurm.reports.wandb_sync", "open W&B's viewer in the terminal", (*CHOICE, SWEEP, RUNS_FOLDER)),
    "prune-runs": Verb("slurm.reports.prune_runs", "show or delete files that finished runs no longer need", (
        *CHOICE, Setting("DELETE", "--delete", "1: delete them; else only show them"), DRY_RUN, RUNS_FOLDER)),
    "tour": Verb("slurm.launch.tour", "run every experiment at its smallest, and compare them", (
        Setting("", "words", "settings for all of them: key=value ..."),)),
}  # fmt: skip
REPORTS = ("compare", "doctor", "logs", "status")  # nothing that matters is left undone when nobody reads on
TARGETS: dict[str, tuple[Setting, ...]] = {
    **{name: verb.settings for name, verb in VERBS.items()},
    "cluster-up": (
        CLUSTER_NAME,
        Setting("NODES", "--nodes", "number of hosts"),
        Setting("RATE", "--rate", "of each cable in each direction, such as 200mbit"),
        Setting("DELAY", "--delay", "of each cable in each direction, such as 5ms"),
        Setting("DB", "--db", "1: accounting in a private database"),
    ),
    **dict.fromkeys(("cluster-down", "cluster-status", "cluster-shell"), (CLUSTER_NAME,)),
    "test": (Setting("TESTS", "tests", "tests to run"),),
    "bench": (NAME, Setting("MINUTES", "--minutes", "time for all")),
}
"""Every target of the Makefile that has settings."""


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all verbs but `cluster`, which has one of its own."""
    top = argparse.ArgumentParser(prog="python -m slurm", allow_abbrev=False)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb_name, verb in VERBS.items():
        parser = verbs.add_parser(verb_name, help=verb.help, description=verb.help, allow_abbrev=False)
        for setting in verb.settings:
            name = setting.variable or "FOLDER"
            if setting.option == "words":
                parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help=setting.help)
            elif setting.option.startswith("--"):
                # an empty RUN is no request to examine hosts, and an empty RESUME none for a new run
                missing = None if setting.option in ("--run", "--resume") else ""
                parser.add_argument(setting.option, default=missing, metavar=name, help=setting.help)
            else:
                parser.add_argument(setting.option, nargs="?", default="", metavar=name, help=setting.help)
        if RUNS_FOLDER in verb.settings:
            old_spelling = "--pick" if CHOICE[0] in verb.settings else "--runs"
            parser.add_argument(old_spelling, default="", help=argparse.SUPPRESS)
    verbs.add_parser("cluster", help="start, end and disturb a SLURM cluster on this machine", add_help=False)
    return top


def accept_old_spellings(given: argparse.Namespace) -> None:
    """Take `--pick IDS` as `--runs IDS`, and `--runs FOLDER` as `--runs-folder FOLDER`, with a notice."""
    runs = getattr(given, "runs", "")
    # methods of Path raise where a name is too long
    names_folder = os.path.isdir(runs) and not os.path.isfile(f"{runs}/config.yaml")  # noqa: PTH112, PTH113
    if runs and (names_folder or CHOICE[0] not in VERBS[given.verb].settings):
        print(f"note: --runs is now --runs-folder: write --runs-folder={runs}", file=sys.stderr)
        given.runs_folder, given.runs = runs, ""
    if getattr(given, "pick", ""):
        print("note: --pick is now --runs", file=sys.stderr)
        given.runs = given.pick


def check_make_variables(goals: list[str], environ: Mapping[str, str]) -> None:
    """Raise UserError for a variable of make's command line that no goal has, or for TESTS that are not there."""
    given = environ.get("GIVEN", "").split()
    known = ["PYTHON", *dict.fromkeys(s.variable for goal in goals for s in TARGETS.get(goal, ()) if s.variable)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise UserError(f"make {' '.join(goals)} has no setting {' '.join(unknown)}; it has {' '.join(known)}")
    if "TESTS" in given:
        check_test_paths(split_words("TESTS", environ["TESTS"]))


def check_test_paths(words: list[str]) -> None:
    """Raise UserError for a path in tests/ that is not there; patterns and options are pytest's."""
    for path in [word.partition("::")[0] for word in words if word.startswith("tests/")]:
        if not Path(path).exists() and "*" not in path:
            hint = suggest_nearest(path, map(str, Path("tests").rglob("[!_.]*")))
            raise UserError(f"TESTS={path}: no such file or folder{hint or '; write it as in tests/unit/core'}")


def translate_target(target: str, environ: Mapping[str, str]) -> list[str]:
    """Translate a target of make into words of this command line. Raises UserError for an unknown variable."""
    check_make_variables(environ.get("MAKECMDGOALS", "").split() or [target], environ)
    given = environ.get("GIVEN", "").split()
    settings = [setting for setting in TARGETS.get(target, ()) if setting.variable in given]
    options = [f"{one.option}={environ[one.variable]}" for one in settings if one.option.startswith("--")]
    positional = [environ[one.variable] for one in settings if not one.option.startswith("--")]
    verb = ["cluster", target.removeprefix("cluster-")] if target.startswith("cluster-") else [target]
    return [*verb, *options, *(["--", *positional] if positional else [])]


def main(words: list[str]) -> int:
    """Carry out one verb; returns the exit status. Raises UserError."""
    if words[:2] == ["--make", "--check"]:
        check_make_variables(os.environ.get("MAKECMDGOALS", "").split(), os.environ)
        return 0
    if words[:1] == ["--make"]:
        words = translate_target(words[1], os.environ)
    if words[:1] == ["cluster"]:
        from slurm.local_cluster import cli

        cli.main(words[1:])
        return 0
    given = make_parser().parse_args(words)
    accept_old_spellings(given)
    return int(importlib.import_module(VERBS[given.verb].module).main(given))


def run_verb(words: list[str]) -> int:
    """Carry out one verb like main; where the reader of its output has left, as `head` does, it ends without a word."""
    try:
        try:
            return main(words)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed at exit
        verb = words[1] if words[0] == "--make" else words[0]
        return 0 if verb in REPORTS else 128 + signal.SIGPIPE


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(run_verb(sys.argv[1:]))
