"""The Makefile and slurm/launch/submit.py: valid, invalid and hostile arguments.

make runs in a temporary folder, with copies of the Makefile and requirements.txt and a `.venv` with the Python of the
tests, so that no test needs or rebuilds the environment of the project. A Python that records its arguments shows what
make passes on. Commands get such arguments within this process, and in a few tests through make.
"""

from __future__ import annotations

import argparse
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from common.system.errors import UserError
from slurm.__main__ import TARGETS, VERBS
from slurm.local_cluster import cli
from tests.benchmarks import __main__ as bench
from tests.harness.commands import execution, in_process_calls
from tests.harness.commands.make_targets import record_slurm_arguments
from tests.harness.commands.processes import (
    WAIT_TIMEOUT,
    FinishedRun,
    Settings,
    find_processes,
    make_environment,
    write_script,
)
from tests.harness.repository import ROOT
from tests.harness.runs.synthetic_runs import SyntheticRun
from tests.harness.slurm.fake_slurm import FakeSlurm
from tests.harness.verification.verify import FAST_FOLDERS, FURTHER_FOLDERS

HOSTILE = [
    "x; touch pwned",
    "x && touch pwned",
    "../x",
    "/etc/passwd",
    "$(shell touch pwned)",
    "$(touch pwned)",
    "${PATH}",
    "`touch pwned`",
    "x\ntouch pwned",
    "x\n\ttouch pwned",
    "'x",
    '"; touch pwned; "',
    "\\",
    "#",
    "-x",
    "--help",
    "\udcff",
    "x" * 300,
]
THROUGH_MAKE = ["$(shell touch pwned)", "x\n\ttouch pwned", '"; touch pwned; "']


def make(place: Path, *arguments: str, status: int | None = 0, **env: str) -> FinishedRun:
    """Execute make in a folder, and check its exit status, unless `status` is None."""
    completed = subprocess.run(
        ["make", *arguments],
        cwd=place,
        env=make_environment(**({"PYTEST_ADDOPTS": ""} | env)),  # otherwise, it contains the TESTS of the outer make
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=WAIT_TIMEOUT,
        check=False,
    )
    assert status in (None, completed.returncode), completed
    return FinishedRun(completed.returncode, completed.stdout, completed.stderr, place / "runs")


def check_nothing_was_created(place: Path) -> None:
    assert {path.name for path in place.iterdir()} == {"Makefile", "requirements.txt", ".venv"}


def refused(place: Path, *arguments: str) -> str:
    """Check that make prints one error, fails and creates nothing; return the error."""
    completed = make(place, *arguments, status=2)
    check_nothing_was_created(place)
    assert "Traceback" not in completed.stdout + completed.stderr, completed
    (error,) = (line for line in completed.stderr.splitlines() if line.startswith("error: "))
    return error


def refused_inside(place: Path, *arguments: str) -> str:
    """Check the same of a command that is called within this process."""
    before = sorted(place.iterdir())
    completed = in_process_calls.call_verb(*arguments, cwd=place, status=2)
    assert sorted(place.iterdir()) == before
    return completed.stderr


def submitted(place: Path, *arguments: str, name: str = "mnist_pipeline") -> str:
    """Return the message with which `make exp` refuses arguments; a dry run, so that nothing starts otherwise."""
    return refused_inside(place, "exp", "--dry-run=1", *arguments, "--", name)


def test_help_lists_every_target(place: Path) -> None:
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))
    help_texts = dict(re.findall(r"^([a-z][a-z-]*):.*?## (.*)", text, re.MULTILINE))
    completed = make(place)
    assert [line.split()[1] for line in completed.stdout.splitlines()] == list(help_texts)
    assert help_texts.keys() == targets
    for line in completed.stdout.splitlines():
        assert help_texts[line.split()[1]] in line
    assert make(place, "help").stdout == completed.stdout


# ---- what make passes on


def list_variables(target: str) -> list[str]:
    return [setting.variable for setting in TARGETS[target] if setting.variable]


VARIABLES_BY_TARGET = {target: list_variables(target) for target in TARGETS}
COMMANDS = [name for name in VARIABLES_BY_TARGET if name not in ("test", "bench")]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_every_text_reaches_the_commands_unchanged(place: Path, text: str) -> None:
    patterns = {
        "exp NAME": "{}",
        "exp ARGS": "--args={}",
        "exp NODES": "--nodes={}",
        "rerun RUN": "{}",
        "compare RUNS": "--runs={}",
        "compare WHERE": "--where={}",
        "sync SWEEP": "--sweep={}",
        "prune-runs LAST": "--last={}",
    }
    for name, pattern in patterns.items():
        target, variable = name.split()
        arguments = record_slurm_arguments(place, target, f"{variable}={text}")
        assert pattern.format(text) in arguments, (target, variable, arguments)
    check_nothing_was_created(place)


@pytest.mark.parametrize("target", COMMANDS)
def test_every_setting_of_a_target_reaches_its_command(place: Path, target: str) -> None:
    variables = VARIABLES_BY_TARGET[target]
    arguments = record_slurm_arguments(place, target, *(f"{variable}=value-of-{variable}" for variable in variables))
    assert " ".join(arguments).startswith(target.replace("cluster-", "cluster "))
    for variable in variables:
        matches = [argument for argument in arguments if f"value-of-{variable}" in re.split("[= ]", argument)]
        assert len(matches) == 1, (variable, arguments)
        argument = matches[0]
        if argument.startswith("--"):
            option = argument.partition("=")[0].removeprefix("--").replace("-", "_").upper()
            assert option in (variable, {"RUNS": "PICK"}.get(variable)), argument


@pytest.mark.parametrize("target", VARIABLES_BY_TARGET)
def test_no_setting_is_expanded(place: Path, target: str) -> None:
    text = "$(shell touch pwned)`touch pwned`$(touch pwned)'\"; touch pwned; '\""
    variables = VARIABLES_BY_TARGET[target]
    make(place, "--dry-run", target, *(f"{variable}={text}" for variable in variables))
    make(place, "--dry-run", target, status=0, **dict.fromkeys(variables, text))
    assert not (place / "pwned").exists()


def test_help_names_the_settings_of_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target, help_text in re.findall(r"^([a-z][a-z-]*):.*?## (.*)", makefile, re.MULTILINE):
        variables = set(re.findall(r"\b([A-Z][A-Z_]+)(?==)", help_text)) - {"ID"}
        assert variables == set(VARIABLES_BY_TARGET.get(target, ())), target


def test_every_verb_explains_its_settings() -> None:
    for verb, settings in VERBS.items():
        completed = in_process_calls.call_verb(verb, "--help")
        for setting in settings.settings:
            assert setting.help.split()[0] in completed.stdout
        assert "Raises" not in completed.stdout


def test_the_help_of_a_local_cluster_mentions_no_exceptions() -> None:
    (verbs,) = (action for action in cli.make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    texts = [cli.make_parser().format_help()]
    texts += [parser.format_help() for parser in verbs.choices.values()]
    assert "Start a host that is powered off.\n" in texts[0]
    for text in texts:
        assert "Raises" not in text


def test_an_empty_resume_starts_no_new_run(tmp_path: Path) -> None:
    message = refused_inside(tmp_path, "exp", "--resume=", "--dry-run=1", "--", "mnist_pipeline")
    assert "RESUME is empty; set RESUME=<id>, or omit RESUME to start a new run" in message
    message = refused_inside(tmp_path, "exp", "--args=--resume=runs/x", "--", "mnist_pipeline")
    assert "--resume is not allowed in ARGS; use make exp RESUME=<id>" in message


@pytest.mark.parametrize("minutes", ["-1", "0", "nan", "inf", "x"])
def test_an_invalid_budget_is_refused(minutes: str) -> None:
    with pytest.raises(UserError, match=f"MINUTES={minutes}: give a number of minutes above 0"):
        bench.parse_budget(minutes, "")
    assert bench.parse_budget("", "3") == (5, 3)


@pytest.mark.parametrize("target", ["lint", "test-all", "tables"])
def test_targets_without_settings_refuse_them(place: Path, target: str) -> None:
    completed = make(place, target, "NODES=2", status=2)
    assert f"make {target} does not accept NODES; it accepts PYTHON" in completed.stderr


def test_clean_refuses_a_dry_run(place: Path) -> None:
    completed = make(place, "clean", "DRY_RUN=1", status=2)
    assert "make clean has no settings" in completed.stderr
    assert (place / ".venv").exists()


def test_several_targets_accept_the_settings_of_each(place: Path) -> None:
    completed = make(place, "status", "sync", "ALL=1", "DRY_RUN=1", status=2)
    assert "does not accept" not in completed.stderr
    assert "no runs in runs yet" in completed.stderr


# ---- make test


def test_make_verify_executes_every_folder_of_make_test_all() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (fast_folders,) = re.findall(r"FAST := (.+)", makefile)
    (further_folders,) = re.findall(r"pytest \$\(FAST\) (.+) -m \"not omitted\"", makefile)
    assert tuple(fast_folders.split()) == FAST_FOLDERS
    assert tuple(further_folders.split()) == FURTHER_FOLDERS


def test_a_make_that_a_target_starts_accepts_the_settings_of_its_own_target(place: Path) -> None:
    start_make = 'if [ "$2" = tests.harness.verification.verify ]; then exec make status ALL=1; fi'
    write_script(place / ".venv/bin/python", f'{start_make}\nPYTHONPATH="{ROOT}" exec "{sys.executable}" "$@"')
    assert "heartbeat" in make(place, "verify").stdout


@pytest.mark.slow
def test_tests_are_selected_by_quoted_arguments(place: Path) -> None:
    write_script(place / ".venv/bin/python", f'PYTHONPATH="{ROOT}" exec "{sys.executable}" "$@" --numprocesses 0')
    for name in ("unit/test_fast.py", "cluster/test_slow.py"):
        file = place / "tests" / name
        file.parent.mkdir(parents=True)
        file.write_text("".join(f"def test_{letter}() -> None: ...\n" for letter in "abc"))
    (place / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    with open(place / "tests/unit/test_fast.py", "a") as opened:
        opened.write("import pytest\n@pytest.mark.slow\ndef test_d() -> None: ...\n")
    completed = make(place, "test")
    assert "3 passed, 1 deselected" in completed.stdout, completed
    completed = make(place, "test", "TESTS=tests/unit -k test_d")
    assert "1 passed, 3 deselected" in completed.stdout, completed
    completed = make(place, "test", "TESTS=-k 'test_a or test_b'")
    assert "2 passed, 2 deselected" in completed.stdout, completed
    completed = make(place, "test", "TESTS=tests/unit/test_fst.py::test_a", status=2)
    message = "error: TESTS=tests/unit/test_fst.py: no such file or folder; did you mean tests/unit/test_fast.py?"
    assert message in completed.stderr, completed
    completed = make(place, "test", "TESTS=-k 'a or b", status=2)
    assert 'error: TESTS="-k \'a or b" cannot be split into words: No closing' in completed.stderr, completed


def test_a_selection_of_tests_is_not_executed(place: Path) -> None:
    write_script(place / ".venv/bin/python", f'PYTHONPATH="{ROOT}" exec "{sys.executable}" "$@" --numprocesses 0')
    completed = make(place, "test", "TESTS=--rootdir='$(touch pwned)`touch pwned`'", status=2)
    assert "/$(touch pwned)`touch pwned`' not found" in completed.stderr, completed
    assert not (place / "pwned").exists(), completed


# ---- make exp


@pytest.mark.parametrize("text", THROUGH_MAKE, ids=ascii)
def test_hostile_arguments_are_refused_through_make(place: Path, text: str) -> None:
    message = refused(place, "exp", f"NAME={text}")
    assert "unknown experiment" in message
    assert "mnist_pipeline" in message
    refused(place, "exp", "NAME=mnist_pipeline", f"ARGS={text}")


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_hostile_names_are_refused(tmp_path: Path, text: str) -> None:
    message = submitted(tmp_path, name=text)
    assert "unknown experiment" in message
    assert "mnist_pipeline" in message


@pytest.mark.parametrize("text", [text for text in HOSTILE if text != "--help"], ids=ascii)
def test_hostile_arguments_are_refused(tmp_path: Path, text: str) -> None:
    submitted(tmp_path, f"--args={text}")


@pytest.mark.parametrize("text", ["stages='$(shell touch pwned)'", "stages='`touch pwned`'", "stages=;id"])
def test_hostile_values_are_refused(tmp_path: Path, text: str) -> None:
    message = submitted(tmp_path, f"--args={text}")
    assert "stages=" in message


@pytest.mark.parametrize(
    "text", ["0", "-1", "abc", "1.5", "2 3", "$(shell touch pwned)", "1;touch pwned", "1\n2", "000"]
)
def test_bad_node_counts_are_refused(tmp_path: Path, text: str) -> None:
    assert "NODES must be an integer" in submitted(tmp_path, f"--nodes={text}")


def test_an_invalid_number_of_nodes_is_refused_with_the_valid_ones(place: Path) -> None:
    message = refused(place, "exp", "NAME=mnist_pipeline", "NODES=3")
    assert "launch.nodes=3" in message
    assert "[1, 2]" in message


@pytest.mark.parametrize("text", ["$(shell touch pwned)", "x; touch pwned", "x\ntouch x", "'x", "x" * 300], ids=ascii)
@pytest.mark.parametrize(
    "arguments",
    [("compare", "--runs={}"), ("compare", "--where={}"), ("sync", "--sweep={}"), ("prune-runs", "--last={}")],
    ids=["compare RUNS", "compare WHERE", "sync SWEEP", "prune-runs LAST"],
)
def test_hostile_arguments_about_runs_are_refused(tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    refused_inside(tmp_path, *(argument.replace("{}", text) for argument in arguments))


def test_two_numbers_of_nodes_are_refused(place: Path) -> None:
    assert "NODES and launch.nodes in ARGS set" in submitted(place, "--nodes=2", "--args=launch.nodes=4")


def test_an_unknown_launch_starts_no_sweep(place: Path) -> None:
    arguments = ("exp", "--launch=slrum", "--args=sweep=true", "--", "amp_accum")
    assert "omit LAUNCH=slrum" in refused_inside(place, *arguments)


def test_a_path_that_is_too_long_is_refused_without_a_traceback(place: Path) -> None:
    error = submitted(place, f"--args=weights={'x' * 300}", name="ddp_multinode")
    assert error.startswith("error: weights=xxx"), error


def test_the_time_limit_of_a_step_is_compared_with_the_warning_of_jobs_only(place: Path) -> None:
    arguments = ("exp", "--dry-run=1", "--launch=local", "--args=launch.step_timeout=300", "--", "mnist_pipeline")
    in_process_calls.call_verb(*arguments, cwd=place)


def test_missing_name_lists_the_experiments(place: Path) -> None:
    assert "run, for example, make exp NAME=" in refused(place, "exp")


def test_help_and_print_config(place: Path) -> None:
    completed = in_process_calls.call_verb("exp", "--args=--help", "--", "mnist_pipeline", cwd=place)
    assert "microbatches=4" in completed.stdout
    printed = make(place, "exp", "NAME=mnist_pipeline", "NODES=2", "ARGS=--print-config batch=128")
    settings = yaml.safe_load(printed.stdout)
    assert settings["batch"] == 128
    assert settings["launch"]["nodes"] == 2
    assert not printed.runs.exists()


def test_invalid_settings_are_refused_without_torch(tmp_path: Path) -> None:
    for name in ("torch", "torchvision", "wandb"):
        fake = tmp_path / "fake" / name / "__init__.py"
        fake.parent.mkdir(parents=True)
        fake.write_text(f"raise SystemExit('{name} was imported')\n")
    program = """
from common.system.errors import UserError
from slurm.__main__ import main
for words in (
    ["--", "mnist_pipelin"],
    ["--args=epoch=1", "--", "mnist_pipeline"],
    ["--args=microbatches=3", "--", "mnist_pipeline"],
    ["--args=schedule=none.py:f", "--", "mnist_pipeline"],
    ["--nodes=0", "--", "mnist_pipeline"],
):
    try:
        main(["exp", *words])
    except UserError as error:
        print(error)
"""
    env = make_environment(PYTHONPATH=f"{tmp_path / 'fake'}:{ROOT}")
    completed = execution.execute_command(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, real_process=True, status=0
    )
    assert not completed.stderr, completed
    parts = ("did you mean mnist_pipeline?", "did you mean epochs?", "microbatches=2 or 4", "none.py", "NODES must be")
    messages = completed.stdout.splitlines()
    assert len(messages) == len(parts), messages
    for part, line in zip(parts, messages, strict=True):
        assert part in line, messages


@pytest.mark.slow
def test_nodes_are_laid_out_as_local_processes(place: Path, digits: Settings) -> None:
    """SLURM is installed without a configuration, as in a fresh installation of Debian."""
    fake = FakeSlurm(place.parent)
    fake.slurm_conf.unlink()
    env = fake.make_environment()
    settings = f"ARGS={' '.join(digits)} steps=3 batch=16"
    completed = make(place, "exp", "NAME=mnist_pipeline", "NODES=2", "FOLLOW=1", settings, status=0, **env)
    assert "not using SLURM: 2 nodes are simulated by processes on this machine" in completed.stdout
    assert not fake.calls_file.exists()
    assert completed.folder.result["state"] == "finished"
    config = yaml.safe_load((completed.folder.path / "config.yaml").read_text())
    assert config["launch"]["nodes"] == 2
    logs = (completed.folder.path / "attempts/0001/logs").glob("rank-*")
    assert {path.name for path in logs} == {"rank-0.log", "rank-1.log"}
    assert not find_processes(str(place))


def test_numbers_of_hosts_are_passed_on_unchanged(place: Path) -> None:
    text = "$(shell touch pwned)'\"`"
    assert f"(got {text!r})" in refused(place, "cluster-up", f"NODES={text}")


ACCEPTED_SETTINGS = {
    "exp NODE=2": "NAME NODES",
    "prune-runs RUN=1234 DRY_RUN=0": "RUNS NAME LAST WHERE DELETE DRY_RUN",
    "tour ARGS=a": "",
}


@pytest.mark.parametrize("arguments, accepted", ACCEPTED_SETTINGS.items())
def test_an_unknown_setting_of_a_target_is_refused(place: Path, arguments: str, accepted: str) -> None:
    completed = make(place, *arguments.split(), status=2)
    target, setting = arguments.split()[:2]
    name = setting.partition("=")[0]
    assert f"make {target} does not accept {name}; it accepts PYTHON {accepted}".strip() in completed.stderr


def test_the_environment_sets_nothing(place: Path) -> None:
    make(place, "status", NAME="DESKTOP-1", RUN="anna's", JSON="yes", WAIT="x")


STATUS_WITH_CLOSED_PIPE = {
    "status": 0,
    "compare": 0,
    "logs -- 0000": 0,
    "doctor --run=0000": 0,
    "doctor --help": 0,
    "prune-runs": 128 + signal.SIGPIPE,
}


@pytest.mark.slow
@pytest.mark.parametrize("arguments, status", STATUS_WITH_CLOSED_PIPE.items(), ids=str)
def test_a_closed_pipe_is_no_error(tmp_path: Path, arguments: str, status: int) -> None:
    SyntheticRun("mnist_pipeline", 0, 20).write(tmp_path / "runs")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "slurm", *arguments.split()]
    env = make_environment(PYTHONPATH=str(ROOT))
    completed = subprocess.run(command, cwd=tmp_path, env=env, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (completed.returncode, completed.stderr) == (status, b"")


@pytest.mark.parametrize("verb", ["logs", "cancel"])
def test_a_missing_run_is_refused_with_the_newest_runs(place: Path, verb: str) -> None:
    assert "RUN is missing; set RUN=<id> (newest runs in runs: none)" in refused(place, verb)
    for age, name in enumerate(("d", "c", "b", "a")):
        file = place / "runs" / name / "config.yaml"
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (1000 - age, 1000 - age))
    completed = make(place, verb, status=2)
    assert completed.stderr.startswith("error: RUN is missing; set RUN=<id> (newest runs in runs: d, c, b)")


# ---- setting up


def set_up(place: Path, python: Path | str, status: int = 0) -> FinishedRun:
    shutil.rmtree(place / ".venv", ignore_errors=True)
    return make(place, "exp", "NAME=mnist_pipeline", f"PYTHON={python}", status=status)


def fake_python(place: Path, older: bool = False, bare: bool = False) -> Path:
    """A python without packages that answers the questions of the Makefile and makes a .venv without any download."""
    return write_script(
        place.parent / "a folder/python",
        f"""case "$*" in
          *version_info*) exit {int(older)};;
          *ensurepip*) exit {int(bare)};;
          *--check) PYTHONPATH="{ROOT}" exec "{sys.executable}" -S "$@";;
          "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python;;
          *"pip install"*) echo installed >> "{place.parent}/installed";;
        esac""",
    )


def change_requirements(place: Path, addition: str = "# another\n") -> None:
    """Add text to requirements.txt, which is then newer than the environment."""
    requirements = place / "requirements.txt"
    requirements.write_text(requirements.read_text() + addition)
    later = (place / ".venv/.ready").stat().st_mtime + 10
    os.utime(requirements, (later, later))


def test_python_without_venv_gets_the_remedy(place: Path) -> None:
    completed = set_up(place, fake_python(place, bare=True), status=2)
    assert "apt-get install python3-venv" in completed.stderr
    assert not (place / ".venv").exists()


@pytest.mark.parametrize("missing", [False, True])
def test_old_or_missing_python_gets_the_remedy(place: Path, missing: bool) -> None:
    completed = set_up(place, "/nowhere/python3" if missing else fake_python(place, older=True), status=2)
    assert completed.stderr.count("error: ") == 1
    assert "older than Python 3.11; set PYTHON=" in completed.stderr
    assert not (place / ".venv").exists()


def test_an_unknown_setting_is_refused_before_anything_is_set_up(place: Path) -> None:
    shutil.rmtree(place / ".venv")
    for arguments, target, name in (
        ("test TSTS=tests/unit", "test", "TSTS"),
        ("exp NAME=mnist_pipeline NODS=2", "exp", "NODS"),
        ("lint A=1", "lint", "A"),
    ):
        completed = make(place, *arguments.split(), f"PYTHON={fake_python(place)}", status=2)
        message = f"error: make {target} does not accept {name}; it accepts PYTHON"
        assert message in completed.stderr, completed.stderr
        assert not (place / ".venv").exists()
        assert "setting up" not in completed.stdout
    make(place, "exp", "NAME=mnist_pipeline", f"PYTHON={fake_python(place)}")


def test_environment_is_built_once_and_again_only_for_new_requirements(place: Path) -> None:
    python = fake_python(place)
    installed = place.parent / "installed"
    for _ in range(2):
        make(place, "logs", f"PYTHON={python}", status=2)
    assert not installed.exists()  # .venv was there
    set_up(place, python)
    make(place, "lint", f"PYTHON={python}")
    assert installed.read_text().count("installed") == 1
    os.utime(place / "Makefile")
    make(place, "lint", f"PYTHON={python}")
    assert installed.read_text().count("installed") == 1
    change_requirements(place, "")
    make(place, "lint", f"PYTHON={python}")
    assert installed.read_text().count("installed") == 1  # a checkout sets the time, and the content is the same
    change_requirements(place)
    make(place, "lint", f"PYTHON={python}")
    assert installed.read_text().count("installed") == 2


def test_the_environment_is_not_rebuilt_under_running_processes(place: Path) -> None:
    python = fake_python(place)
    installed = place.parent / "installed"
    set_up(place, python)
    library = place / ".venv/library.so"
    library.write_bytes(bytes(4096))
    change_requirements(place)
    with open(library, "rb") as mapped, mmap.mmap(mapped.fileno(), 0, prot=mmap.PROT_READ):
        completed = make(place, "lint", f"PYTHON={python}", status=2)
        reports = [make(place, *arguments, f"PYTHON={python}") for arguments in (["status"], ["doctor", "RUN=0000"])]
        make(place, "doctor", f"PYTHON={python}", status=2)
    assert "while processes use .venv; stop them (make status, make cancel" in completed.stderr
    assert library.exists()
    for report in reports:
        assert report.stderr.count("note: requirements.txt has changed") == 1, reports
    assert installed.read_text().count("installed") == 1
    make(place, "lint", f"PYTHON={python}")
    assert installed.read_text().count("installed") == 2
    assert not library.exists()


def test_the_environment_is_not_rebuilt_while_jobs_of_the_checkout_use_it(place: Path) -> None:
    python = fake_python(place)
    installed = place.parent / "installed"
    set_up(place, python)
    change_requirements(place)
    squeue = place.parent / "bin" / "squeue"
    squeue.parent.mkdir(exist_ok=True)
    squeue.write_text(f"#!/bin/sh\necho 1 {place}/other\necho 2 {place}\n")
    squeue.chmod(0o755)
    path = f"{squeue.parent}:{os.environ['PATH']}"
    completed = make(place, "lint", f"PYTHON={python}", status=2, PATH=path)
    assert "while jobs of this folder use .venv; cancel them (make status, make cancel" in completed.stderr
    assert installed.read_text().count("installed") == 1
    make(place, "lint", f"PYTHON={python}", PATH=path, SLURM_JOB_ID="2")  # the job of this command itself
    assert installed.read_text().count("installed") == 2


def test_folder_behind_a_linked_environment_is_left_alone(place: Path) -> None:
    shared = place.parent / "shared"
    (place / ".venv").rename(shared)
    (place / ".venv").symlink_to(shared)
    before = sorted(shared.rglob("*"))
    (shared / ".ready").unlink()
    make(place, "lint", f"PYTHON={fake_python(place)}")
    assert sorted(shared.rglob("*")) == [path for path in before if path.name != ".ready"]
    assert not (place / ".venv").is_symlink()
