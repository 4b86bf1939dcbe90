"""The command line of the project: `python -m slurm VERB`. Targets of the Makefile with settings are verbs.

    python -m slurm --help           the verbs
    python -m slurm exp --help       the settings of a verb
    python -m slurm --make exp       the verb, with the variables of make's command line as settings

A verb imports only what it needs, and torch as late as possible.
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
    """A setting of a verb: a variable of make, and an option or positional argument of this command line."""

    variable: str
    """Its name in make, or empty."""
    option: str
    """Such as `--nodes`; a positional argument has no dashes."""
    help: str


class Verb(NamedTuple):
    """A verb: the module whose `main` executes it, its help, and its settings."""

    module: str
    help: str
    settings: tuple[Setting, ...] = ()


NAME = Setting("NAME", "name", "experiment: name of a file in experiments/, such as mnist_pipeline")
RUN = Setting("RUN", "run", "id of a run, its last four characters, or the path of a run folder")
NODES = Setting("NODES", "--nodes", "number of hosts (1)")
ARGS = Setting("ARGS", "--args", 'settings of the experiment, and of the cluster as cluster.key=value: "key=value ..."')
LAUNCH = Setting(
    "LAUNCH",
    "--launch",
    "local, slurm, slurm:NAME for a local cluster, or auto: a local cluster, else SLURM, else this machine (auto)",
)
CLUSTER = Setting("CLUSTER", "--cluster", "profile of the cluster: name of a file in configs/cluster/ (default)")
FOLLOW = Setting("FOLLOW", "--follow", "1: print the log of rank 0 until the run ends")
DRY_RUN = Setting("DRY_RUN", "--dry-run", "1: print what would be done, and do nothing")
JSON = Setting("JSON", "--json", "1: print JSON for programs")
RUNS_FOLDER = Setting("", "--runs-folder", "folder that holds the runs (runs)")
CHOICE = (
    Setting("RUNS", "--runs", 'runs by id, last four characters or path: "ID ID ..."'),
    Setting("NAME", "--name", "runs of this experiment"),
    Setting("LAST", "--last", "number of newest runs"),
    Setting("WHERE", "--where", 'runs with these settings: "strategy=ddp optim.lr>=0.01"'),
)
SWEEP = Setting("SWEEP", "--sweep", "runs of this sweep: its name or folder")
CLUSTER_NAME = Setting("NAME", "--name", "name of the local cluster (local)")

VERBS = {
    "exp": Verb("slurm.launch.submit", "run an experiment on this machine or a cluster, or resume a run", (
        NAME, NODES, ARGS, LAUNCH, CLUSTER, FOLLOW, DRY_RUN,
        Setting("STRICT", "--strict", "1: refuse a checkout with uncommitted changes"),
        Setting("RESUME", "--resume", "run to resume from its newest checkpoint, instead of a new run of NAME"))),
    "new-experiment": Verb("slurm.launch.new_experiment", "write the files of a new experiment, ready to train", (
        Setting("NAME", "name", "name of the new experiment, such as my_mlp"),)),
    "check-optimizer": Verb("slurm.launch.check_optimizer", "test a custom optimizer before a run uses it", (
        Setting("FILE", "file", "its file and class, such as lion.py:Lion; or a built-in name of optim.name"),)),
    "rerun": Verb("slurm.launch.rerun", "repeat a run with its settings and source, and compare bitwise", (
        RUN, ARGS, LAUNCH, CLUSTER)),
    "evaluate": Verb("slurm.reports.trained_model", "evaluate the trained model of a finished run again", (
        RUN, Setting("ARGS", "--args", 'other samples: "data.root=... data.test_limit=1000"; also eval_batch, log.*'))),
    "export": Verb("slurm.reports.trained_model", "write the trained model for other programs", (
        RUN, Setting("FORMAT", "--format", "safetensors, torch.export or onnx (safetensors)"))),
    "sweep": Verb("slurm.launch.sweep", "run the points of a grid that have no run yet", (
        Setting("GRID", "grid", "file of the sweep, such as configs/sweeps/mnist_pipeline_rates.yaml"),
        ARGS, LAUNCH, CLUSTER,
        Setting("FAILED", "--failed", "1: start the failed points again, with the current source"),
        FOLLOW, DRY_RUN)),
    "doctor": Verb("slurm.reports.doctor", "check all hosts before a long job, or find why a run failed or hangs", (
        NODES, Setting("ARGS", "--args", "runs, data.cache and launch.mixed of the job, and cluster.key=value"),
        LAUNCH, CLUSTER, Setting("RUN", "--run", "run to examine, instead of hosts"), JSON)),
    "status": Verb("slurm.reports.status", "print the state of the newest runs, or of one run", (
        RUN, Setting("WAIT", "--wait", "seconds to wait for the end of the run"),
        Setting("ALL", "--all", "1: list all runs, as JSON=1 does, not only the newest 20"), JSON, RUNS_FOLDER)),
    "logs": Verb("slurm.reports.logs", "print the log of rank 0 of a run", (RUN, FOLLOW, RUNS_FOLDER)),
    "cancel": Verb("slurm.reports.cancel", "stop a run, which saves a checkpoint first", (RUN, RUNS_FOLDER)),
    "compare": Verb("slurm.reports.compare", "compare runs, in a table and on a page for a browser", (
        *CHOICE, SWEEP, Setting("PAGE", "--page", "file of the page (runs/compare.html)"), JSON, RUNS_FOLDER)),
    "sync": Verb("slurm.reports.wandb_sync", "send runs that were tracked offline to W&B", (
        *CHOICE, SWEEP, DRY_RUN, RUNS_FOLDER)),
    "dashboard": Verb("slurm.reports.wandb_dashboard", "create a W&B workspace to compare runs", (
        Setting("PROJECT", "--project", "project of W&B, or entity/project"), DRY_RUN)),
    "leet": Verb("slurm.reports.wandb_sync", "open the W&B viewer for the terminal", (*CHOICE, SWEEP, RUNS_FOLDER)),
    "prune-runs": Verb("slurm.reports.prune_runs", "list or delete files that finished runs no longer need", (
        *CHOICE, Setting("DELETE", "--delete", "1: delete them; otherwise only list them"), DRY_RUN, RUNS_FOLDER)),
    "tour": Verb("slurm.launch.tour", "run every experiment at its smallest, and compare the runs", (
        Setting("", "words", "settings of all runs: key=value ..."),)),
}  # fmt: skip
REPORTS = ("compare", "doctor", "logs", "status")
"""Verbs without effects, which succeed also if their output is not read to the end."""
TARGETS: dict[str, tuple[Setting, ...]] = {
    **{name: verb.settings for name, verb in VERBS.items()},
    "cluster-up": (
        CLUSTER_NAME,
        Setting("NODES", "--nodes", "number of hosts"),
        Setting("RATE", "--rate", "data rate of each cable and direction, such as 200mbit"),
        Setting("DELAY", "--delay", "delay of each cable and direction, such as 5ms"),
        Setting("DB", "--db", "1: accounting in a private database"),
    ),
    **dict.fromkeys(("cluster-down", "cluster-status", "cluster-shell"), (CLUSTER_NAME,)),
    "test": (Setting("TESTS", "tests", "tests to run"),),
    "bench": (NAME, Setting("MINUTES", "--minutes", "time for all measurements")),
}
"""Every target of the Makefile that has settings."""


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all verbs except `cluster`, which has another one."""
    top = argparse.ArgumentParser(prog="python -m slurm", allow_abbrev=False)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, verb in VERBS.items():
        parser = verbs.add_parser(name, help=verb.help, description=verb.help, allow_abbrev=False)
        for setting in verb.settings:
            add_setting(parser, setting)
        if RUNS_FOLDER in verb.settings:
            old_spelling = "--pick" if CHOICE[0] in verb.settings else "--runs"
            parser.add_argument(old_spelling, default="", help=argparse.SUPPRESS)
    verbs.add_parser("cluster", help="start, stop and disturb a SLURM cluster on this machine", add_help=False)
    return top


def add_setting(parser: argparse.ArgumentParser, setting: Setting) -> None:
    """Add the option or positional argument of a setting to the parser of a verb."""
    metavar = setting.variable or "FOLDER"
    if setting.option == "words":
        parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help=setting.help)
    elif setting.option.startswith("--"):
        # An empty RUN or RESUME is an error, unlike a missing one.
        default = None if setting.option in ("--run", "--resume") else ""
        parser.add_argument(setting.option, default=default, metavar=metavar, help=setting.help)
    else:
        parser.add_argument(setting.option, nargs="?", default="", metavar=metavar, help=setting.help)


def accept_old_spellings(args: argparse.Namespace) -> None:
    """Accept `--pick IDS` as `--runs IDS`, and `--runs FOLDER` as `--runs-folder FOLDER`, with a notice."""
    runs = getattr(args, "runs", "")
    # methods of Path raise if a name is too long
    is_folder = os.path.isdir(runs) and not os.path.isfile(f"{runs}/config.yaml")  # noqa: PTH112, PTH113
    if runs and (is_folder or CHOICE[0] not in VERBS[args.verb].settings):
        print(f"note: --runs is now --runs-folder: write --runs-folder={runs}", file=sys.stderr)
        args.runs_folder = runs
        args.runs = ""
    if getattr(args, "pick", ""):
        print("note: --pick is now --runs", file=sys.stderr)
        args.runs = args.pick


def check_make_variables(goals: list[str], environ: Mapping[str, str]) -> None:
    """Raise UserError for a variable of make's command line that no goal has, or for missing TESTS."""
    given_names = environ.get("GIVEN", "").split()
    valid_names = ["PYTHON"]
    for goal in goals:
        valid_names += [setting.variable for setting in TARGETS.get(goal, ()) if setting.variable]
    unknown = [name for name in given_names if name not in valid_names]
    if unknown:
        names = " ".join(dict.fromkeys(valid_names))
        raise UserError(f"make {' '.join(goals)} has no setting {' '.join(unknown)}; it has {names}")
    if "TESTS" in given_names:
        check_test_paths(split_words("TESTS", environ["TESTS"]))


def check_test_paths(arguments: list[str]) -> None:
    """Raise UserError for a missing path in tests/; patterns and options are for pytest."""
    for argument in arguments:
        path = argument.partition("::")[0]
        if path.startswith("tests/") and "*" not in path and not Path(path).exists():
            hint = suggest_nearest(path, map(str, Path("tests").rglob("[!_.]*")))
            raise UserError(f"TESTS={path}: no such file or folder{hint or '; write it as in tests/unit/core'}")


def translate_target(target: str, environ: Mapping[str, str]) -> list[str]:
    """Translate a target of make to arguments of this command line. Raises UserError for an unknown variable."""
    check_make_variables(environ.get("MAKECMDGOALS", "").split() or [target], environ)
    given_names = environ.get("GIVEN", "").split()
    arguments = [target]
    if target.startswith("cluster-"):
        arguments = ["cluster", target.removeprefix("cluster-")]
    positional: list[str] = []
    for setting in TARGETS.get(target, ()):
        if setting.variable not in given_names:
            continue
        value = environ[setting.variable]
        if setting.option.startswith("--"):
            arguments.append(f"{setting.option}={value}")
        else:
            positional.append(value)
    return [*arguments, "--", *positional] if positional else arguments


def main(arguments: list[str]) -> int:
    """Execute a verb; returns the exit status. Raises UserError."""
    if arguments[:2] == ["--make", "--check"]:
        check_make_variables(os.environ.get("MAKECMDGOALS", "").split(), os.environ)
        return 0
    if arguments[:1] == ["--make"]:
        arguments = translate_target(arguments[1], os.environ)
    if arguments[:1] == ["cluster"]:
        from slurm.local_cluster import cli

        cli.main(arguments[1:])
        return 0
    args = make_parser().parse_args(arguments)
    accept_old_spellings(args)
    return int(importlib.import_module(VERBS[args.verb].module).main(args))


def run_verb(arguments: list[str]) -> int:
    """Execute a verb like `main`, but exit quietly on a broken pipe, for example with `head`."""
    try:
        try:
            return main(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the output that is flushed at exit
        verb = arguments[1] if arguments[0] == "--make" else arguments[0]
        return 0 if verb in REPORTS else 128 + signal.SIGPIPE


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(run_verb(sys.argv[1:]))
