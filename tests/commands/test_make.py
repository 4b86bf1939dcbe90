"""The Makefile and slurm/launch/submit.py: what a person types, honest or hostile.

make runs in a folder of its own, with copies of the Makefile and of requirements.txt and a `.venv` whose python
is this one: the project's environment can neither be missing nor be rebuilt by a test. What make hands over is told by
a python that only writes down its words; what the commands make of such words is asked within this process, and a few
times all the way through.
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
from tests.harness import inside
from tests.harness.fake_slurm import Fake
from tests.harness.made_runs import Made
from tests.harness.making import handed_over
from tests.harness.processes import Done, environment, processes_of, script
from tests.harness.warm import ROOT

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


def make(place: Path, *words: str, **env: str) -> Done:
    done = subprocess.run(
        ["make", *words],
        cwd=place,
        env=environment(**env),
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=60,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr, place / "runs")


def refused(done: Done, place: Path) -> str:
    """Check that there is one message, a failing status, and nothing made; returns the message."""
    assert {path.name for path in place.iterdir()} == {"Makefile", "requirements.txt", ".venv"}
    return message_of(done.status, done.out, done.err)


def message_of(status: int, out: str, err: str) -> str:
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status == 2, out + err
    assert len(errors) == 1, err
    assert "Traceback" not in out + err
    return errors[0]


def refused_inside(place: Path, *words: str) -> str:
    """The same of a command that is called within this process."""
    before = sorted(place.iterdir())
    done = inside.run_verb(*words, cwd=place)
    assert sorted(place.iterdir()) == before
    return message_of(done.returncode, done.stdout, done.stderr)


def submitted(place: Path, *words: str, name: str = "mnist_pipeline") -> str:
    """How `make exp` refuses such words; were they not refused, it would only show what it would start."""
    return refused_inside(place, "exp", "--dry-run=1", *words, "--", name)


def test_help_lists_every_target(place: Path) -> None:
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))
    words = dict(re.findall(r"^([a-z][a-z-]*):.*?## (.*)", text, re.MULTILINE))
    done = make(place)
    assert [line.split()[1] for line in done.out.splitlines()] == list(words)
    assert words.keys() == targets
    assert all(words[line.split()[1]] in line for line in done.out.splitlines())
    assert make(place, "help").out == done.out


# ---- what make hands over


KNOWN = {name: [one.variable for one in settings if one.variable] for name, settings in TARGETS.items()}
COMMANDS = [name for name in KNOWN if name not in ("test", "bench")]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_every_text_reaches_the_commands_as_it_was_written(place: Path, text: str) -> None:
    for target, variable, word in (
        ("exp", "NAME", "{}"),
        ("exp", "ARGS", "--args={}"),
        ("exp", "NODES", "--nodes={}"),
        ("rerun", "RUN", "{}"),
        ("compare", "RUNS", "--runs={}"),
        ("compare", "WHERE", "--where={}"),
        ("sync", "SWEEP", "--sweep={}"),
        ("prune-runs", "LAST", "--last={}"),
    ):
        words = handed_over(place, target, f"{variable}={text}")
        assert word.format(text) in words, (target, variable, words)
    assert {path.name for path in place.iterdir()} == {"Makefile", "requirements.txt", ".venv"}


@pytest.mark.parametrize("target", COMMANDS)
def test_every_setting_of_a_target_reaches_its_command(place: Path, target: str) -> None:
    variables = KNOWN[target]
    words = handed_over(place, target, *(f"{variable}=value-of-{variable}" for variable in variables))
    assert " ".join(words).startswith(target.replace("cluster-", "cluster "))
    for variable in variables:
        told = [word for word in words if f"value-of-{variable}" in re.split("[= ]", word)]
        assert len(told) == 1, (variable, words)
        option = told[0].partition("=")[0].removeprefix("--").replace("-", "_").upper()
        assert not told[0].startswith("--") or option in (variable, {"RUNS": "PICK"}.get(variable)), told


@pytest.mark.parametrize("target", KNOWN)
def test_no_setting_is_expanded(place: Path, target: str) -> None:
    text = "$(shell touch pwned)`touch pwned`$(touch pwned)'\"; touch pwned; '\""
    variables = KNOWN[target]
    done = make(place, "--dry-run", target, *(f"{variable}={text}" for variable in variables))
    assert done.status == 0, done.err
    assert make(place, "--dry-run", target, **dict.fromkeys(variables, text)).status == 0
    assert not (place / "pwned").exists()


def test_help_names_the_settings_of_every_target() -> None:
    for target, words in re.findall(r"^([a-z][a-z-]*):.*?## (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE):
        assert set(re.findall(r"\b([A-Z][A-Z_]+)(?==)", words)) - {"ID"} == set(KNOWN.get(target, ())), target


def test_every_verb_explains_its_settings() -> None:
    for verb, settings in VERBS.items():
        done = inside.run_verb(verb, "--help")
        assert done.returncode == 0 and all(one.help.split()[0] in done.stdout for one in settings.settings)
        assert "Raises" not in done.stdout


def test_the_verbs_of_a_local_cluster_are_explained_without_what_their_functions_raise() -> None:
    (verbs,) = (action for action in cli.make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    texts = [cli.make_parser().format_help(), *(parser.format_help() for parser in verbs.choices.values())]
    assert "Start a host that is powered off.\n" in texts[0] and not any("Raises" in text for text in texts)


def test_an_empty_resume_starts_no_new_run(tmp_path: Path) -> None:
    message = refused_inside(tmp_path, "exp", "--resume=", "--dry-run=1", "--", "mnist_pipeline")
    assert "RESUME is empty; set RESUME=<id>, or omit RESUME to start a new run" in message


@pytest.mark.parametrize("minutes", ["-1", "0", "nan", "inf", "x"])
def test_a_budget_of_no_time_is_refused(minutes: str) -> None:
    with pytest.raises(UserError, match=f"MINUTES={minutes}: give a number of minutes above 0"):
        bench.parse_budget(minutes, "")
    assert bench.parse_budget("", "3") == (5, 3)


@pytest.mark.parametrize("target", ["lint", "test-all", "tables"])
def test_targets_without_settings_refuse_them(place: Path, target: str) -> None:
    done = make(place, target, "NODES=2")
    assert done.status == 2 and f"make {target} does not accept NODES; it accepts PYTHON" in done.err


def test_clean_refuses_a_dry_run(place: Path) -> None:
    done = make(place, "clean", "DRY_RUN=1")
    assert done.status == 2 and "make clean has no settings" in done.err and (place / ".venv").exists()


def test_targets_together_may_have_the_settings_of_each(place: Path) -> None:
    done = make(place, "status", "sync", "ALL=1", "DRY_RUN=1")
    assert "does not accept" not in done.err and "no runs in runs yet" in done.err


# ---- make test


def test_tests_are_chosen_by_words_with_quotes(place: Path) -> None:
    script(place / ".venv/bin/python", f'PYTHONPATH="{ROOT}" exec "{sys.executable}" "$@" --numprocesses 0')
    for name in ("unit/test_fast.py", "cluster/test_slow.py"):
        file = place / "tests" / name
        file.parent.mkdir(parents=True)
        file.write_text("".join(f"def test_{letter}() -> None: ...\n" for letter in "abc"))
    done = make(place, "test", "TESTS=-k 'test_a or test_b'")
    assert done.status == 0 and "2 passed, 1 deselected" in done.out, done
    done = make(place, "test", "TESTS=tests/cluster/*.py --rootdir='$(touch pwned)`touch pwned`'")
    assert "/$(touch pwned)`touch pwned`' not found" in done.err and not (place / "pwned").exists(), done
    done = make(place, "test", "TESTS=tests/unit/test_fst.py::test_a")
    told = "error: TESTS=tests/unit/test_fst.py: no such file or folder; did you mean tests/unit/test_fast.py?"
    assert done.status == 2 and told in done.err, done
    done = make(place, "test", "TESTS=-k 'a or b")
    assert done.status == 2 and 'error: TESTS="-k \'a or b" cannot be split into words: No closing' in done.err, done


# ---- make exp


@pytest.mark.parametrize("text", THROUGH_MAKE, ids=ascii)
def test_hostile_words_are_refused_through_make(place: Path, text: str) -> None:
    message = refused(make(place, "exp", f"NAME={text}"), place)
    assert "unknown experiment" in message and "mnist_pipeline" in message
    refused(make(place, "exp", "NAME=mnist_pipeline", f"ARGS={text}"), place)


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_hostile_names_are_refused(tmp_path: Path, text: str) -> None:
    message = submitted(tmp_path, name=text)
    assert "unknown experiment" in message and "mnist_pipeline" in message


@pytest.mark.parametrize("text", [text for text in HOSTILE if text != "--help"], ids=ascii)
def test_hostile_arguments_are_refused(tmp_path: Path, text: str) -> None:
    submitted(tmp_path, f"--args={text}")


@pytest.mark.parametrize("text", ["stages='$(shell touch pwned)'", "stages='`touch pwned`'", "stages=;id"])
def test_hostile_values_are_refused(tmp_path: Path, text: str) -> None:
    assert "stages=" in submitted(tmp_path, f"--args={text}")


@pytest.mark.parametrize(
    "text", ["0", "-1", "abc", "1.5", "2 3", "$(shell touch pwned)", "1;touch pwned", "1\n2", "000"]
)
def test_bad_node_counts_are_refused(tmp_path: Path, text: str) -> None:
    assert "NODES must be an integer" in submitted(tmp_path, f"--nodes={text}")


def test_nodes_that_do_not_fit_are_refused_with_those_that_do(place: Path) -> None:
    message = refused(make(place, "exp", "NAME=mnist_pipeline", "NODES=3"), place)
    assert "launch.nodes=3" in message
    assert "[1, 2]" in message


@pytest.mark.parametrize("text", ["$(shell touch pwned)", "x; touch pwned", "x\ntouch x", "'x", "x" * 300], ids=ascii)
@pytest.mark.parametrize(
    "words",
    [("compare", "--runs={}"), ("compare", "--where={}"), ("sync", "--sweep={}"), ("prune-runs", "--last={}")],
    ids=["compare RUNS", "compare WHERE", "sync SWEEP", "prune-runs LAST"],
)
def test_hostile_words_about_runs_are_refused(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    refused_inside(tmp_path, *(word.replace("{}", text) for word in words))


def test_missing_name_lists_the_experiments(place: Path) -> None:
    assert "run, for example, make exp NAME=" in refused(make(place, "exp"), place)


def test_help_and_print_config(place: Path) -> None:
    done = inside.run_verb("exp", "--args=--help", "--", "mnist_pipeline", cwd=place)
    assert done.returncode == 0
    assert "microbatches=4" in done.stdout
    shown = make(place, "exp", "NAME=mnist_pipeline", "NODES=2", "ARGS=--print-config batch=128")
    assert shown.status == 0
    settings = yaml.safe_load(shown.out)
    assert (settings["batch"], settings["launch"]["nodes"]) == (128, 2)
    assert not shown.runs.exists()


def test_bad_settings_are_answered_without_torch(tmp_path: Path) -> None:
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
    env = environment(PYTHONPATH=f"{tmp_path / 'fake'}:{ROOT}")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr, done
    parts = ("did you mean mnist_pipeline?", "did you mean epochs?", "microbatches=2 or 4", "none.py", "NODES must be")
    said = done.stdout.splitlines()
    assert len(said) == len(parts) and all(part in line for part, line in zip(parts, said, strict=True)), said


def test_nodes_are_laid_out_as_local_processes(place: Path, digits: tuple[str, ...]) -> None:
    """Where SLURM is installed, but has no configuration, as Debian leaves it."""
    fake = Fake(place.parent)
    fake.conf.unlink()
    env = fake.environment()
    settings = f"ARGS={' '.join(digits)} steps=3 batch=16"
    done = make(place, "exp", "NAME=mnist_pipeline", "NODES=2", "FOLLOW=1", settings, **env)
    assert done.status == 0, done
    assert "not using SLURM: 2 nodes are simulated by processes on this machine" in done.out
    assert not fake.calls.exists()
    assert done.folder.result["state"] == "finished"
    written = yaml.safe_load((done.folder.path / "config.yaml").read_text())
    assert written["launch"]["nodes"] == 2
    assert sorted(path.name for path in done.folder.attempt_folder.parent.glob("0001/logs/rank-*")) == [
        "rank-0.log",
        "rank-1.log",
    ]
    assert not processes_of(str(place))


def test_numbers_of_hosts_are_handed_over_as_they_are(place: Path) -> None:
    text = "$(shell touch pwned)'\"`"
    assert f"(got {text!r})" in refused(make(place, "cluster-up", f"NODES={text}"), place)


@pytest.mark.parametrize(
    ("target", "word", "known"),
    [
        ("exp", "NODE=2", "NAME NODES"),
        ("prune-runs", "RUN=1234", "RUNS NAME LAST WHERE DELETE DRY_RUN"),
        ("tour", "ARGS=a", ""),
    ],
)
def test_a_setting_that_a_target_does_not_have_is_refused(place: Path, target: str, word: str, known: str) -> None:
    done = make(place, target, word, "DRY_RUN=0") if target == "prune-runs" else make(place, target, word)
    name = word.partition("=")[0]
    assert done.status == 2 and f"make {target} does not accept {name}; it accepts PYTHON {known}".strip() in done.err


def test_the_environment_sets_nothing(place: Path) -> None:
    done = make(place, "status", NAME="DESKTOP-1", RUN="somebody's", JSON="yes", WAIT="x")
    assert done.status == 0, done.err


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["status"], 0),
        (["compare"], 0),
        (["logs", "--", "0000"], 0),
        (["doctor", "--run=0000"], 0),
        (["doctor", "--help"], 0),
        (["prune-runs"], 128 + signal.SIGPIPE),
    ],
    ids=str,
)
def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path, words: list[str], status: int) -> None:
    Made("mnist_pipeline", 0, 20).write(tmp_path / "runs")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "slurm", *words]
    env = environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(command, cwd=tmp_path, env=env, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (status, b"")


@pytest.mark.parametrize("verb", ["logs", "cancel"])
def test_a_missing_run_is_answered_with_the_newest(place: Path, verb: str) -> None:
    assert "RUN is missing; set RUN=<id> (newest runs in runs: none)" in refused(make(place, verb), place)
    for age, name in enumerate(("d", "c", "b", "a")):
        file = place / "runs" / name / "config.yaml"
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (1000 - age, 1000 - age))
    done = make(place, verb)
    assert done.status == 2
    assert done.err.startswith("error: RUN is missing; set RUN=<id> (newest runs in runs: d, c, b)")


# ---- setting up


def set_up(place: Path, python: Path | str) -> Done:
    shutil.rmtree(place / ".venv", ignore_errors=True)
    return make(place, "exp", "NAME=mnist_pipeline", f"PYTHON={python}")


def fake_python(place: Path, older: bool = False, bare: bool = False) -> Path:
    """A python without packages that answers the questions of the Makefile and makes a .venv without any download."""
    return script(
        place.parent / "a folder" / "python",
        f"""case "$*" in
          *version_info*) exit {int(older)};;
          *ensurepip*) exit {int(bare)};;
          *--check) PYTHONPATH="{ROOT}" exec "{sys.executable}" -S "$@";;
          "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python;;
          *"pip install"*) echo installed >> "{place.parent}/installed";;
        esac""",
    )


def test_python_without_venv_gets_the_remedy(place: Path) -> None:
    done = set_up(place, fake_python(place, bare=True))
    assert done.status == 2
    assert "apt-get install python3-venv" in done.err
    assert not (place / ".venv").exists()


@pytest.mark.parametrize("missing", [False, True])
def test_old_or_missing_python_gets_the_remedy(place: Path, missing: bool) -> None:
    done = set_up(place, "/nowhere/python3" if missing else fake_python(place, older=True))
    assert done.status == 2
    assert done.err.count("error: ") == 1
    assert "older than Python 3.11; set PYTHON=" in done.err
    assert not (place / ".venv").exists()


def test_an_unknown_setting_is_refused_before_anything_is_set_up(place: Path) -> None:
    shutil.rmtree(place / ".venv")
    for target, words in (
        ("test", ("TSTS=tests/unit",)),
        ("exp", ("NAME=mnist_pipeline", "NODS=2")),
        ("lint", ("A=1",)),
    ):
        done = make(place, target, *words, f"PYTHON={fake_python(place)}")
        name = words[-1].partition("=")[0]
        message = f"error: make {target} does not accept {name}; it accepts PYTHON"
        assert done.status == 2 and message in done.err, done.err
        assert not (place / ".venv").exists() and "setting up" not in done.out
    assert make(place, "exp", "NAME=mnist_pipeline", f"PYTHON={fake_python(place)}").status == 0


def test_environment_is_built_once_and_again_only_for_new_requirements(place: Path) -> None:
    python, installed = fake_python(place), place.parent / "installed"
    for _ in range(2):
        assert make(place, "logs", f"PYTHON={python}").status
    assert not installed.exists()  # .venv was there
    assert set_up(place, python).status == 0
    assert make(place, "lint", f"PYTHON={python}").status == 0
    assert installed.read_text().count("installed") == 1
    os.utime(place / "Makefile")
    assert make(place, "lint", f"PYTHON={python}").status == 0
    assert installed.read_text().count("installed") == 1
    later = (place / ".venv/.ready").stat().st_mtime + 10
    os.utime(place / "requirements.txt", (later, later))
    assert make(place, "lint", f"PYTHON={python}").status == 0
    assert installed.read_text().count("installed") == 1  # a checkout sets the time, and the content is the same
    with open(place / "requirements.txt", "a") as file:
        file.write("# another\n")
    os.utime(place / "requirements.txt", (later + 10, later + 10))
    assert make(place, "lint", f"PYTHON={python}").status == 0
    assert installed.read_text().count("installed") == 2


def test_the_environment_is_not_rebuilt_under_running_processes(place: Path) -> None:
    python, installed = fake_python(place), place.parent / "installed"
    assert set_up(place, python).status == 0
    library = place / ".venv" / "library.so"
    library.write_bytes(bytes(4096))
    with open(place / "requirements.txt", "a") as file:
        file.write("# another\n")
    later = (place / ".venv/.ready").stat().st_mtime + 10
    os.utime(place / "requirements.txt", (later, later))
    with open(library, "rb") as mapped, mmap.mmap(mapped.fileno(), 0, prot=mmap.PROT_READ):
        done = make(place, "lint", f"PYTHON={python}")
        reports = [make(place, *words, f"PYTHON={python}") for words in (["status"], ["doctor", "RUN=0000"])]
        examination = make(place, "doctor", f"PYTHON={python}")
    assert done.status and "while processes use .venv; stop them (make status, make cancel" in done.err
    assert examination.status and library.exists()
    assert [report.status for report in reports] == [0, 0], reports
    assert all(report.err.count("note: requirements.txt has changed") == 1 for report in reports), reports
    assert installed.read_text().count("installed") == 1
    assert make(place, "lint", f"PYTHON={python}").status == 0
    assert installed.read_text().count("installed") == 2 and not library.exists()


def test_folder_behind_a_linked_environment_is_left_alone(place: Path) -> None:
    shared = place.parent / "shared"
    (place / ".venv").rename(shared)
    (place / ".venv").symlink_to(shared)
    before = sorted(shared.rglob("*"))
    (shared / ".ready").unlink()
    assert make(place, "lint", f"PYTHON={fake_python(place)}").status == 0
    assert sorted(shared.rglob("*")) == [path for path in before if path.name != ".ready"]
    assert not (place / ".venv").is_symlink()
