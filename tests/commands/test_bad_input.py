"""Invalid settings, files and data, and full disks: one clear message, the correct status, and no files left.

Invalid settings and files are tested within this process, and one of them with the real command. The other cases are
runs; tests/complete/test_disks.py has further cases of full and read-only disks.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.config import config
from common.data.sources import MNIST_FILES
from common.system.errors import UserError
from slurm.__main__ import main
from tests.harness.commands import in_process_calls
from tests.harness.commands.bad_input import (
    DISK_CASES,
    FAST_SUITE_CASE_NAMES,
    SETTINGS_CASES,
    BadInputCase,
    check_case,
    make_file_writer,
)
from tests.harness.commands.processes import execute_verb, make_environment
from tests.harness.commands.refusals import expect_refusal
from tests.harness.environment.randomness import draw_cases
from tests.harness.repository import ROOT
from tests.harness.runs.damaged_runs import RUN_COMMANDS
from tests.harness.runs.synthetic_runs import SyntheticRun

MNIST = ("data.name=mnist", "data.root={folder}/raw", "data.download_timeout=0")


def configured(name: str, text: str, *parts: str) -> BadInputCase:
    return BadInputCase(name, ("--config=own.yaml",), parts, prepare_folder=make_file_writer("own.yaml", text))


def scheduled(name: str, body: str, *parts: str, arguments: tuple[str, ...] = ("schedule=own.py:f",)) -> BadInputCase:
    """Return a case with two stages, two microbatches, and this function as schedule."""
    text = f"def f(ranks, stages, microbatches):\n    {body}\n"
    return BadInputCase(name, (*arguments, "microbatches=2"), parts, prepare_folder=make_file_writer("own.py", text))


FILES = [
    configured("--config is no YAML", "batch: [1\nx: }", "own.yaml", "not valid YAML"),
    configured("--config is a list", "- batch\n", "own.yaml", "key: value"),
    configured("--config has an unknown key", "batch: 32\nbatches: 3\n", "unknown key batches"),
    configured("--config has a name with a line break", 'run:\n  name: "a\\nb"\n', "run.name='a\\nb': line breaks"),
    configured("--config has a wrong type", "optim:\n  lr: fast\n", "optim.lr=fast"),
    scheduled(
        "schedule: no file",
        "pass",
        "there is no file ",
        "name an existing FILE.py:function",
        "naive, gpipe, 1f1b, interleaved_1f1b, zero_bubble, zbv, dualpipev",
        arguments=("schedule=no.py:f",),
    ),
    scheduled("schedule: no function", "pass", "no function 'g'", "it has f", arguments=("schedule=own.py:g",)),
    scheduled(
        "schedule: does not import", "return []\n1 / 0", "schedule=own.py:f: own.py:3: ZeroDivisionError: division"
    ),
    scheduled("schedule: too few ranks", "return [[]]", "(got 1 list for 2 ranks)"),
    scheduled("schedule: no actions", "return 7", "own.py:1: 'int' object is not iterable"),
    scheduled("schedule: leaves", "raise SystemExit(0)", "own.py:2: SystemExit: 0"),
    scheduled(
        "schedule: incomplete",
        "return [[(k, s, m) for k in 'FB' for m in range(2) if (k, s, m) != ('B', 1, 1)] for s in range(2)]",
        "rank 1 never executes the backward of microbatch 1 on stage 1",
    ),
    scheduled(
        "schedule: deadlock",
        "return [[('F', 0, 0), ('B', 0, 0), ('F', 0, 1), ('B', 0, 1)], "
        "[('F', 1, 1), ('B', 1, 1), ('F', 1, 0), ('B', 1, 0)]]",
        "deadlock",
        "the backward of microbatch 0 on stage 0 waits",
    ),
]

# ---- data


def raw(**sizes: int | None) -> Callable[[Path, Path], None]:
    """Create raw MNIST files without content; `sizes` sets the size of a file, or None if it is missing."""

    def setup(place: Path, cache: Path) -> None:
        folder = place / "raw/MNIST/raw"
        folder.mkdir(parents=True)
        for name, size in MNIST_FILES.items():
            expected_size = sizes.get(name.replace("-", "_"), size)
            if expected_size is not None:
                with open(folder / name, "wb") as opened:
                    opened.write(b"\0\0\x08\x03" if "images" in name else b"\0\0\x08\x01")
                    opened.truncate(expected_size)

    return setup


def damaged(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    """Copy the prepared data and change one of its arrays."""

    def setup(place: Path, cache: Path) -> None:
        shutil.copytree(cache, place / "cache", copy_function=os.link)
        (labels,) = (place / "cache").glob("digits-*/test_labels.npy")
        content = labels.read_bytes()
        labels.unlink()  # a link to the file that all tests use
        labels.write_bytes(change(content))

    return setup


def flip(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


DATA = [
    BadInputCase(
        "mnist: none, and no fallback",
        (*MNIST, "data.fallback=none"),
        ("MNIST is not in the folder {folder}/raw and cannot be downloaded", "set data.root", "data.name=digits"),
        prepare_folder=lambda place, cache: (place / "raw").mkdir(),
        uses_digits=False,
    ),
    BadInputCase(
        "mnist: two files missing",
        MNIST,
        ("train-labels-idx1-ubyte is missing", "delete {folder}/raw/MNIST/raw"),
        prepare_folder=raw(train_labels_idx1_ubyte=None, t10k_images_idx3_ubyte=None),
        uses_digits=False,
    ),
    BadInputCase(
        "mnist: a file cut off",
        MNIST,
        ("t10k-images-idx3-ubyte is damaged: 1000 bytes, expected 7840016", "delete {folder}/raw/MNIST/raw"),
        prepare_folder=raw(t10k_images_idx3_ubyte=1000),
        uses_digits=False,
    ),
    BadInputCase(
        "cache: flipped byte",
        ("data.cache={folder}/cache",),
        ("test_labels.npy is damaged (checksum differs)", "delete"),
        prepare_folder=damaged(flip),
    ),
    BadInputCase(
        "custom data function: integers",
        ("data.name={folder}/own.py:f",),
        ("data.name={folder}/own.py:f: {folder}/own.py:2: the train inputs have dtype int64; return pixels as uint8",),
        prepare_folder=make_file_writer(
            "own.py", "import numpy as np\ndef f(root):\n    return [np.ones((9, 8, 8), int)] * 4\n"
        ),
    ),
    BadInputCase(
        "custom network: a wrong shape of outputs",
        ("model={folder}/own.py:f",),
        ("model={folder}/own.py:f: {folder}/own.py:3: for 8 samples, forward returned the shape [8, 28, 28]; loss=",),
        prepare_folder=make_file_writer(
            "own.py",
            "from torch import nn\nclass f(nn.Linear):\n    def forward(self, x): return super().forward(x)\n"
            "    def __init__(self, shape, outputs): super().__init__(shape[1], shape[1])\n",
        ),
        experiment="ddp_multinode",
    ),
    BadInputCase(
        "custom data function: vectors for convolutions",
        ("data.name={folder}/own.py:f", "data.cache={folder}/sets"),
        ("data.name={folder}/own.py:f contains vectors, but model=convnet needs images; use another data set",),
        prepare_folder=make_file_writer(
            "own.py", "import numpy as np\ndef f(root): return [np.ones((9, 8), np.uint8), np.arange(9)] * 2\n"
        ),
        experiment="ddp_multinode",
    ),
    BadInputCase(
        "cache: cut off",
        ("data.cache={folder}/cache",),
        (),
        exit_status=0,
        prepare_folder=damaged(lambda content: content[:-9]),
    ),
]


WEIGHTS = BadInputCase(
    "weights: no file", ("weights=no.pt",), ("weights=no.pt: no such file",), experiment="ddp_multinode"
)


@pytest.mark.parametrize("case", [*SETTINGS_CASES, *FILES, WEIGHTS], ids=lambda case: case.name)
def test_bad_settings(case: BadInputCase, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case.prepare_folder(tmp_path, cache)
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    for name, value in case.env:
        monkeypatch.setenv(name, value)
    with expect_refusal(*case.message_parts):  # --dry-run, so that nothing would start if it were not refused
        main(["exp", "--dry-run=1", f"--args={' '.join(case.arguments)}", "--", case.experiment])
    assert sorted(tmp_path.iterdir()) == before


def save_weights_of_another_network(place: Path, cache: Path) -> None:
    torch.save({"w": torch.zeros(2)}, place / "w.pt")


REFUSED_BY_RANKS = [
    BadInputCase(
        "weights: of another network",
        ("weights={folder}/w.pt",),
        ("w.pt: missing tensor conv1.bias",),
        prepare_folder=save_weights_of_another_network,
        experiment="ddp_multinode",
    ),
    BadInputCase("no GPU", ("launch.device=cuda",), ("no GPU is visible",), env=(("CUDA_VISIBLE_DEVICES", ""),)),
]


INVALID_RUNS = ["../x", "/etc/passwd", "/", ".", "~", "x; id", "$(id)", "x\ny", "-x", "*", "\udcff", "x" * 300]


@pytest.mark.parametrize("text", INVALID_RUNS, ids=ascii)
@pytest.mark.parametrize("command", RUN_COMMANDS)
def test_an_invalid_run_is_refused(command: str, text: str, tmp_path: Path) -> None:
    arguments = [argument.replace("{}", text) for argument in RUN_COMMANDS[command].split(" ")]
    completed = in_process_calls.call_verb(*arguments, cwd=tmp_path, status=2)
    assert not list(tmp_path.iterdir()), completed


INVALID_ARGUMENTS_ABOUT_MODELS = {
    "export --format=x -- {}": "FORMAT='x' is unknown; use safetensors, torch.export or onnx",
    "export --format=../x -- {}": "FORMAT='../x' is unknown",
    "evaluate --args=epoch=3 -- {}": "unknown key epoch; did you mean epochs?",
    "evaluate --args=batch=many -- {}": "batch=many",
    "evaluate --args=--help -- {}": "--help is not a setting",
    'evaluate "--args=\'x" -- {}': "ARGS",
    "evaluate --args=cluster.time=5 -- {}": "cluster.time",
    "evaluate --args=data.name=nothing -- {}": "data.name=nothing",
    "evaluate '--args=data.test_limit=9 optim.lr=5' -- {}": "optim.lr has no effect on an evaluation",
    "evaluate --args=log.level=debug -- {}": "has no model.safetensors",
}


@pytest.mark.parametrize("arguments, message", INVALID_ARGUMENTS_ABOUT_MODELS.items())
def test_invalid_arguments_about_a_trained_model_are_refused(arguments: str, message: str, tmp_path: Path) -> None:
    folder = SyntheticRun("mnist_pipeline", 0, 20).write(tmp_path)
    completed = in_process_calls.call_verb(*shlex.split(arguments.format(folder.path)), status=2)
    assert message in completed.stderr, completed


INVALID_ARGUMENTS = {
    "sweep -- nope.yaml": "GRID=nope.yaml cannot be read (No such file or directory); name a",
    'exp "--args=steps=5 \'x" -- mnist_pipeline': "No closing quotation; close each quotation mark",
    "tour -- steps=3 --print-config": "ARGS: --print-config is not a setting",
    "check-optimizer -- sdg": "FILE=sdg is unknown; use FILE.py:Class or one of sgd, adam",
    "check-optimizer -- no.py:Own": "FILE=no.py:Own: there is no file",
}


@pytest.mark.parametrize("arguments, message", INVALID_ARGUMENTS.items())
def test_invalid_arguments_of_other_commands_are_refused(arguments: str, message: str, tmp_path: Path) -> None:
    completed = in_process_calls.call_verb(*shlex.split(arguments), cwd=tmp_path, status=2)
    assert message in completed.stderr, completed
    assert completed.stderr.count("\n") == 1, completed
    assert not completed.stdout
    assert not list(tmp_path.iterdir())


def test_a_run_of_another_experiment_is_not_resumed(tmp_path: Path) -> None:
    folder = SyntheticRun("ddp_multinode", 0, 20).write(tmp_path)
    with pytest.raises(UserError, match=r"is a run of ddp_multinode, not of .*; resume it with python experiments/ddp"):
        config.load_config(config.import_schema("mnist_pipeline"), [f"--resume={folder.path}"], {})


def test_a_mistake_at_the_real_command_is_one_line(tmp_path: Path) -> None:
    arguments = ("exp", "--args=epoch=3", "--", "mnist_pipeline")
    env = make_environment(PYTHONPATH=str(ROOT))
    completed = execute_verb(*arguments, cwd=tmp_path, env=env, real_process=True, status=2)
    assert not completed.stdout
    assert completed.stderr.startswith("error: unknown key epoch; did you mean epochs?")
    assert completed.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "case",
    [
        *draw_cases("bad data", [*DATA, *REFUSED_BY_RANKS], 5),
        *(case for case in DISK_CASES if case.name in FAST_SUITE_CASE_NAMES),
    ],
    ids=lambda case: case.name,
)
def test_a_run_meets_bad_data_or_a_full_disk(case: BadInputCase, tmp_path: Path, cache: Path) -> None:
    check_case(case, tmp_path, cache)


@pytest.mark.slow
def test_a_run_continues_without_a_wandb_account(tmp_path: Path, cache: Path) -> None:
    arguments = ("wandb.finish_timeout=200",)
    parts = ("W&B: offline (no W&B account is configured)",)
    case = BadInputCase("W&B: no account", arguments, parts, exit_status=0, env=(("WANDB_MODE", ""),))
    check_case(case, tmp_path, cache)
