"""Command line of the project: `python -m slurm VERB`. Most targets of the Makefile call a verb.

    python -m slurm --help           list the verbs
    python -m slurm exp --help       list the settings of a verb
    python -m slurm --make exp       execute a verb with the variables on make's command line as settings

Each verb imports only the modules that it needs, and imports torch as late as possible.
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

from common.system.errors import UserError, exit_on_user_error
from common.system.output import discard_standard_output, explain_full_output
from slurm.arguments import split_words, suggest_nearest


class Setting(NamedTuple):
    """A setting of a verb. The setting can be passed as a make variable or as a command-line argument."""

    variable: str
    """Name of the make variable, or an empty string if make does not have this setting."""
    option: str
    """Name of the option, such as `--nodes`; the name of a positional argument has no dashes."""
    help: str


class Verb(NamedTuple):
    """A verb of the command line. The function `main` of the module `module` executes the verb."""

    module: str
    help: str
    settings: tuple[Setting, ...] = ()


NAME = Setting("NAME", "name", "name of the experiment: a file in experiments/, such as mnist_pipeline")
RUN = Setting("RUN", "run", "id of the run, last four characters of the id, or path of the run folder")
NODES = Setting("NODES", "--nodes", "number of hosts (default: 1)")
ARGS = Setting("ARGS", "--args", '"key=value ...": settings of the experiment, or of the cluster as cluster.key=value')
LAUNCH = Setting(
    "LAUNCH",
    "--launch",
    "where to run: local, slurm, slurm:NAME for a local cluster, or auto (default), which chooses a local cluster if "
    "one is up, else SLURM if it is configured, else this machine",
)
CLUSTER = Setting("CLUSTER", "--cluster", "cluster profile: name of a file in configs/cluster/ (default: default)")
FOLLOW = Setting("FOLLOW", "--follow", "1: print the log of rank 0 until the run ends")
FOLLOW_SWEEP = Setting("FOLLOW", "--follow", "1: print every change of a point's state until all points have ended")
DRY_RUN = Setting("DRY_RUN", "--dry-run", "1: print the actions without performing them")
ALL = Setting("ALL", "--all", "1: include archived runs")
JSON = Setting("JSON", "--json", "1: print JSON for other programs")
RUNS_FOLDER = Setting("", "--runs-folder", "folder that contains the run folders (default: runs)")
CHOICE = (
    Setting("RUNS", "--runs", '"ID ID ...": select runs by id, last four characters of the id, or path'),
    Setting("NAME", "--name", "select the runs of this experiment"),
    Setting("LAST", "--last", "number of newest runs to select"),
    Setting(
        "WHERE",
        "--where",
        'select the runs with these settings and results, such as "strategy=ddp optim.lr>=0.01 test_accuracy>=0.98"',
    ),
)
SWEEP = Setting("SWEEP", "--sweep", "name or folder of a sweep: select the runs of this sweep")
SELECTIONS = (*CHOICE, SWEEP)
CLUSTER_NAME = Setting("NAME", "--name", "name of the local cluster (default: local)")

VERBS = {
    "exp": Verb("slurm.launch.submit", "run an experiment on this machine or a cluster, or resume a run", (
        NAME, NODES, ARGS, LAUNCH, CLUSTER, FOLLOW, DRY_RUN,
        Setting("STRICT", "--strict", "1: fail if the checkout has uncommitted changes"),
        Setting("RESUME", "--resume", "run to resume from its newest checkpoint, instead of starting a new run"))),
    "new-experiment": Verb("slurm.launch.new_experiment", "create the files of a new experiment, ready to train", (
        Setting("NAME", "name", "name of the new experiment, such as my_mlp"),)),
    "check-optimizer": Verb("slurm.launch.check_optimizer", "test a custom optimizer before a run uses it", (
        Setting("FILE", "file", "file and class, such as lion.py:Lion, or the name of a built-in optimizer"),)),
    "rerun": Verb("slurm.launch.rerun", "repeat a run with the same settings and source, and compare bitwise", (
        RUN, ARGS, LAUNCH, CLUSTER)),
    "evaluate": Verb("slurm.reports.trained_model", "re-evaluate the trained model of a finished run", (
        RUN, Setting("ARGS", "--args", 'settings to change: data.root, data.test_limit, eval_batch, or log.*'))),
    "export": Verb("slurm.reports.trained_model", "export the trained model for use in other programs", (
        RUN, Setting("FORMAT", "--format", "safetensors, torch.export, or onnx (default: safetensors)"))),
    "sample": Verb("slurm.reports.sampled_text", "continue a text with the model of a run", (
        RUN, Setting("TEXT", "--text", "the text to continue (default: a line break)"),
        Setting("TEMPERATURE", "--temperature", "divides the logits (default: 1); 0 selects the most probable token"),
        Setting("TOP_K", "--top-k", "number of most probable tokens that can be drawn (default: all)"),
        Setting("SEED", "--seed", "seed of the random choices (default: 0)"))),
    "sweep": Verb("slurm.launch.sweep", "run all points of a grid that have not been run yet", (
        Setting("GRID", "grid", "sweep file, such as configs/sweeps/mnist_pipeline_rates.yaml"),
        ARGS, LAUNCH, CLUSTER,
        Setting("NAME", "--name", "experiment whose strategies GRID=configs/sweeps/strategies.py compares"),
        Setting("RANKS", "--ranks", "number of ranks of each strategy"),
        Setting("ROUNDS", "--rounds", "number of runs of each strategy (default: 1)"),
        Setting("FAILED", "--failed", "1: run the failed points again with the current source code"),
        FOLLOW_SWEEP, DRY_RUN)),
    "doctor": Verb("slurm.reports.doctor", "check all hosts before a long job, or find out why a run failed or hangs", (
        NODES, Setting("ARGS", "--args", "settings of the job: runs, data.cache, launch.mixed, and cluster.key=value"),
        LAUNCH, CLUSTER, Setting("RUN", "--run", "run to diagnose; without a run, hosts are checked"), JSON)),
    "status": Verb("slurm.reports.status_table", "print the state of the newest runs, or of one run", (
        RUN, Setting("WAIT", "--wait", "maximum time, in seconds, to wait for the run to end"),
        Setting("FOLLOW", "--follow", "1: refresh the table until all listed runs have ended"),
        Setting("ALL", "--all", "1: list all runs, also archived ones, not only the newest 20; JSON=1 implies ALL=1"),
        JSON, RUNS_FOLDER)),
    "logs": Verb("slurm.reports.logs", "print the log of rank 0 of a run", (
        RUN, FOLLOW, Setting("RAW", "--raw", "1: also print the messages of Submitit and srun"), RUNS_FOLDER)),
    "note": Verb("slurm.reports.note", "replace the notes of a run", (
        Setting("RUN", "--run", RUN.help), Setting("TEXT", "--text", "the new notes"), RUNS_FOLDER)),
    "archive": Verb("slurm.reports.archive", "leave runs out of status and compare", (
        *CHOICE, SWEEP, Setting("UNDO", "--undo", "1: list and compare these runs again"), RUNS_FOLDER)),
    "cancel": Verb("slurm.reports.cancel", "stop a run after it has saved a checkpoint", (RUN, RUNS_FOLDER)),
    "compare": Verb("slurm.reports.compare", "compare runs in a table and on an HTML page", (
        *CHOICE, SWEEP, ALL,
        Setting("SORT", "--sort", "column, setting or metric to sort by, such as loss; -loss: descending"),
        Setting("GROUP", "--group", "seed: combine runs that differ only in their seed, with mean and range"),
        Setting("FOLLOW", "--follow", "1: update the page until all runs have ended"),
        Setting("PAGE", "--page", "path of the page (default: runs/compare.html)"), JSON, RUNS_FOLDER)),
    "sync": Verb("slurm.reports.wandb_sync", "upload runs that were tracked offline to W&B", (
        *CHOICE, SWEEP, DRY_RUN, RUNS_FOLDER)),
    "dashboard": Verb("slurm.reports.wandb_dashboard", "create a W&B workspace for comparing runs", (
        Setting("PROJECT", "--project", "W&B project, as project or entity/project"), DRY_RUN)),
    "leet": Verb("slurm.reports.wandb_sync", "open W&B's terminal viewer", (*CHOICE, SWEEP, RUNS_FOLDER)),
    "prune-runs": Verb("slurm.reports.prune_runs", "list or delete files that finished runs no longer need", (
        *CHOICE, Setting("DELETE", "--delete", "1: delete the files; otherwise only list them"), DRY_RUN, RUNS_FOLDER)),
    "tour": Verb("slurm.launch.tour", "run every experiment briefly at a small scale, and compare the runs", (
        Setting("", "words", "settings that apply to all runs"),)),
}  # fmt: skip
REPORTS = ("compare", "doctor", "logs", "status")
"""Read-only verbs. They exit with 0 even if a program such as `head` reads only part of their output."""
TARGETS: dict[str, tuple[Setting, ...]] = {
    **{name: verb.settings for name, verb in VERBS.items()},
    "cluster-up": (
        CLUSTER_NAME,
        Setting("NODES", "--nodes", "number of hosts"),
        Setting("RATE", "--rate", "data rate of each cable in each direction, such as 200mbit"),
        Setting("DELAY", "--delay", "delay of each cable in each direction, such as 5ms"),
        Setting("DB", "--db", "1: record jobs in a private accounting database"),
    ),
    **dict.fromkeys(("cluster-down", "cluster-status", "cluster-shell"), (CLUSTER_NAME,)),
    "test": (Setting("TESTS", "tests", "tests to run"),),
    "bench": (NAME, Setting("MINUTES", "--minutes", "total time, in minutes, for all measurements")),
}
"""Settings of each Makefile target that accepts settings."""


def make_parser() -> argparse.ArgumentParser:
    """Create the parser of all verbs except `cluster`, which has its own parser."""
    top = argparse.ArgumentParser(prog="python -m slurm", allow_abbrev=False)
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, verb in VERBS.items():
        parser = verbs.add_parser(name, help=verb.help, description=verb.help, allow_abbrev=False)
        for setting in verb.settings:
            add_setting(parser, setting)
        if RUNS_FOLDER in verb.settings:
            old_spelling = "--pick" if CHOICE[0] in verb.settings else "--runs"
            parser.add_argument(old_spelling, default=None, help=argparse.SUPPRESS)
    verbs.add_parser(
        "cluster", help="start, stop, and inject faults into a SLURM cluster on this machine", add_help=False
    )
    return top


def add_setting(parser: argparse.ArgumentParser, setting: Setting) -> None:
    """Add a setting to the parser of a verb, as an option or a positional argument."""
    metavar = setting.variable or "FOLDER"
    if setting.option == "words":
        parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help=setting.help)
    elif setting.option.startswith("--"):
        # These settings may be omitted, but an empty value has a meaning or is an error.
        is_omitted_if_none = setting.option in ("--run", "--resume", "--text") or setting in SELECTIONS
        default = None if is_omitted_if_none else ""
        parser.add_argument(setting.option, default=default, metavar=metavar, help=setting.help)
    else:
        parser.add_argument(setting.option, nargs="?", default="", metavar=metavar, help=setting.help)


def refuse_empty_selections(args: argparse.Namespace) -> None:
    """Raise UserError if a setting that selects runs is empty, because the verb would then apply to all runs.

    A setting that was omitted becomes an empty string.
    """
    for setting in SELECTIONS:
        if setting not in VERBS[args.verb].settings:
            continue
        name = setting.option.removeprefix("--")
        value = getattr(args, name)
        if value is not None and not value.strip():
            raise UserError(f"{setting.variable} is empty; omit {setting.variable}, or set it to select runs")
        setattr(args, name, value or "")


def accept_old_spellings(args: argparse.Namespace) -> None:
    """Accept the old options `--pick IDS` and `--runs FOLDER`, and print a notice.

    Their current names are `--runs IDS` and `--runs-folder FOLDER`.
    """
    runs = getattr(args, "runs", None) or ""
    # os.path is used because methods of Path raise an error if a file name is too long.
    is_folder = os.path.isdir(runs) and not os.path.isfile(f"{runs}/config.yaml")
    if runs and (is_folder or CHOICE[0] not in VERBS[args.verb].settings):
        print(f"note: --runs no longer sets the folder of the runs; use --runs-folder={runs}", file=sys.stderr)
        args.runs_folder = runs
        args.runs = ""
    if getattr(args, "pick", None) is not None:
        if not args.pick.strip():
            raise UserError("--pick is empty; omit it, or use --runs to select runs")
        print("note: the option --pick has been renamed to --runs", file=sys.stderr)
        args.runs = args.pick


def check_make_variables(goals: list[str], environ: Mapping[str, str]) -> None:
    """Raise UserError for a make variable that no requested target accepts, or for a missing path in TESTS."""
    given_names = environ.get("GIVEN", "").split()
    valid_names = ["PYTHON"]
    for goal in goals:
        valid_names += [setting.variable for setting in TARGETS.get(goal, ()) if setting.variable]
    unknown = [name for name in given_names if name not in valid_names]
    if unknown:
        names = " ".join(dict.fromkeys(valid_names))
        raise UserError(f"make {' '.join(goals)} does not accept {' '.join(unknown)}; it accepts {names}")
    if "TESTS" in given_names:
        check_test_paths(split_words("TESTS", environ["TESTS"]))


def check_test_paths(arguments: list[str]) -> None:
    """Raise UserError if a path in tests/ does not exist. Patterns and options are not checked."""
    for argument in arguments:
        path = argument.partition("::")[0]
        if path.startswith("tests/") and "*" not in path and not Path(path).exists():
            hint = suggest_nearest(path, map(str, Path("tests").rglob("[!_.]*")))
            raise UserError(f"TESTS={path}: no such file or folder{hint or '; use a path such as tests/unit/config'}")


def translate_target(target: str, environ: Mapping[str, str]) -> list[str]:
    """Translate a make target and its variables into arguments of this command line.

    Raises UserError for an unknown variable.
    """
    check_make_variables(environ.get("GOALS", "").split() or [target], environ)
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
    """Execute a verb and return its exit status. Raises UserError."""
    if arguments[:2] == ["--make", "--check"]:
        check_make_variables(os.environ.get("GOALS", "").split(), os.environ)
        return 0
    if arguments[:1] == ["--make"]:
        arguments = translate_target(arguments[1], os.environ)
    if arguments[:1] == ["cluster"]:
        from slurm.local_cluster import cli

        cli.main(arguments[1:])
        return 0
    args = make_parser().parse_args(arguments)
    refuse_empty_selections(args)
    accept_old_spellings(args)
    return int(importlib.import_module(VERBS[args.verb].module).main(args))


def run_verb(arguments: list[str]) -> int:
    """Execute a verb as `main` does, but exit silently if a program such as `head` closes the output pipe.

    Raises UserError if standard output is on a full disk.
    """
    if sys.stdout is None:  # standard output was closed before Python started
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the process exits)
    try:
        with explain_full_output():
            try:
                return main(arguments)
            finally:
                sys.stdout.flush()
    except BrokenPipeError:
        discard_standard_output()
        verb = arguments[1] if arguments[0] == "--make" else arguments[0]
        return 0 if verb in REPORTS else 128 + signal.SIGPIPE


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(run_verb(sys.argv[1:]))
