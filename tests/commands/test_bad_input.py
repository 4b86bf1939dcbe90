"""Mistakes and misfortunes, each met through the real way in: one clear message, the right status, nothing left.

Mistakes in settings and in files are all made within this process, and a few of each kind at the real command. Every
other case is a process of its own and most of them import torch, so these run a few at a time, once, before the
first test looks at its own.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from common.config import UserError
from common.prepare import RAW
from slurm import submit
from tests.harness.processes import ROOT, Done, environment, processes_of

TOGETHER = 2  # cases at a time: some of them wait more than they compute
MNIST = ("data.name=mnist", "data.root=raw", "data.download_timeout=0")
KEY = "0123456789abcdef" * 2 + "01234567"


@dataclasses.dataclass(frozen=True)
class Case:
    """A command in a folder of its own, and what its answer must hold."""

    name: str
    words: tuple[str, ...]
    parts: tuple[str, ...]
    """What the error message holds; of a run that goes on, what its output holds."""
    status: int = 2
    setup: Callable[[Path, Path], None] = lambda place, cache: None
    """Lays out the folder; also gets the prepared digits."""
    script: bool = True
    """The experiment's script, or else what `make exp` starts, which answers without torch."""
    disk: str = ""
    """Shell lines around `run`, with a disk of this case's own at ./disk: full, read-only."""
    env: tuple[tuple[str, str], ...] = ()
    fast: bool = True
    """Train on the digits that are prepared already."""
    experiment: str = "mnist_pipeline"


# ---- settings


def settings(name: str, *words: str, parts: tuple[str, ...]) -> Case:
    return Case(name, words, parts, script=False)


SETTINGS = [
    settings("unknown key", "epoch=3", parts=("unknown key epoch", "did you mean epochs?")),
    settings("unknown group", "optm.lr=1", parts=("unknown key optm.lr", "did you mean optim.lr?")),
    settings("wrong type", "batch=many", parts=("batch=many", "int >= 1")),
    settings("a float for an int", "batch=1.5", parts=("batch=1.5", "int >= 1")),
    settings("number without end", "seed=" + "9" * 5000, parts=("seed=9", "whole number")),
    settings("not a number", "optim.lr=nan", parts=("optim.lr=nan", "float from 0 to 100")),
    *(
        settings(f"{key}=0", f"{key}=0", parts=(f"{key}=0: out of range; allowed: int ",))
        for key in ("batch", "stages", "microbatches", "epochs", "eval_batch", "launch.nodes", "stages_per_process")
    ),
    settings("negative steps", "steps=-1", parts=("steps=-1", "int >= 0")),
    settings("more stages than layers", "stages=4", parts=("stages=4", "3 layers", "at most 3")),
    settings("microbatches that do not divide", "microbatches=5", parts=("batch=64", "microbatches=4 or 8")),
    settings("more microbatches than samples", "batch=4", "microbatches=8", parts=("microbatches=4",)),
    settings("batch above the set", "batch=60001", "microbatches=1", parts=("60000 training samples",)),
    *(settings(f"no {key}", f"{key}=", parts=(f"{key}= is empty",)) for key in ("runs", "data.cache")),
    settings("huge batch", f"batch={10**12}", parts=("60000 training samples",)),
    settings("no word", "--frobnicate", parts=("'--frobnicate'", "usage")),
    settings("control characters", "'runs=a\nb'", parts=("runs=", "control characters")),
    settings("project that W&B rejects", "wandb.project=a/b", parts=("wandb.project=a/b", "128")),
    settings("empty tag", "wandb.tags=[a,,b]", parts=("wandb.tags", "1 to 64")),
    settings("no such --config", "--config=nowhere.yaml", parts=("nowhere.yaml", "no such configuration file")),
    settings("--config is a folder", "--config=/", parts=("/: cannot be read",)),
    dataclasses.replace(
        settings("WANDB_MODE unknown", parts=("WANDB_MODE=sometimes", "auto, online, offline, disabled")),
        env=(("WANDB_MODE", "sometimes"),),
    ),
]


def file(name: str, text: str) -> Callable[[Path, Path], None]:
    def setup(place: Path, cache: Path) -> None:
        (place / name).write_text(text)

    return setup


def configured(name: str, text: str, *parts: str) -> Case:
    return Case(name, ("--config=own.yaml",), parts, setup=file("own.yaml", text), script=False)


def scheduled(name: str, body: str, *parts: str, words: tuple[str, ...] = ("schedule=own.py:f",)) -> Case:
    """Two stages, two microbatches, and this file as schedule."""
    text = f"def f(processes, stages, microbatches):\n    {body}\n"
    return Case(name, (*words, "microbatches=2"), parts, setup=file("own.py", text), script=False)


FILES = [
    configured("--config is no YAML", "batch: [1\nx: }", "own.yaml", "not valid YAML"),
    configured("--config is a list", "- batch\n", "own.yaml", "key: value"),
    configured("--config has an unknown key", "batch: 32\nbatches: 3\n", "unknown key batches"),
    configured("--config has a wrong type", "optim:\n  lr: fast\n", "optim.lr=fast"),
    scheduled(
        "schedule: no file",
        "pass",
        "nor an existing FILE.py:function",
        words=("schedule=no.py:f",),
    ),
    scheduled("schedule: no function", "pass", "no function 'g'", "it has f", words=("schedule=own.py:g",)),
    scheduled("schedule: does not import", "return []\n1 / 0", "own.py cannot be imported", "ZeroDivisionError"),
    scheduled("schedule: too few processes", "return [[]]", "needs one for each of the 2 processes"),
    scheduled("schedule: no actions", "return 7", "schedule=own.py:f"),
    scheduled("schedule: leaves", "raise SystemExit(0)", "schedule=own.py:f"),
    scheduled(
        "schedule: incomplete",
        "return [[(k, s, m) for k in 'FB' for m in range(2) if (k, s, m) != ('B', 1, 1)] for s in range(2)]",
        "process 1 never does the backward of microbatch 1 on stage 1",
    ),
    scheduled(
        "schedule: deadlock",
        "return [[('F', 0, 0), ('B', 0, 0), ('F', 0, 1), ('B', 0, 1)], "
        "[('F', 1, 1), ('B', 1, 1), ('F', 1, 0), ('B', 1, 0)]]",
        "deadlock",
        "waits at backward of microbatch 0 on stage 0",
    ),
]

# ---- data


def raw(**sizes: int | None) -> Callable[[Path, Path], None]:
    """Raw MNIST files of the right size without content, but for those named: another size, or missing."""

    def setup(place: Path, cache: Path) -> None:
        folder = place / "raw/MNIST/raw"
        folder.mkdir(parents=True)
        for name, size in RAW.items():
            wanted = sizes.get(name.replace("-", "_"), size)
            if wanted is not None:
                with open(folder / name, "wb") as opened:
                    opened.write(b"\0\0\x08\x03" if "images" in name else b"\0\0\x08\x01")
                    opened.truncate(wanted)

    return setup


def damaged(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    """A prepared set of which one array has been changed."""

    def setup(place: Path, cache: Path) -> None:
        shutil.copytree(cache, place / "cache", copy_function=os.link)
        (labels,) = (place / "cache").glob("digits-*/test_labels.npy")
        content = labels.read_bytes()
        labels.unlink()  # it is a link to the one that all tests use
        labels.write_bytes(change(content))

    return setup


def flip(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


DATA = [
    Case("mnist: none, and no fallback", (*MNIST, "data.fallback=none"), ("data.root", "data.name=digits"), fast=False),
    Case(
        "mnist: two files missing",
        MNIST,
        ("train-labels-idx1-ubyte is missing", "delete raw/MNIST/raw"),
        setup=raw(train_labels_idx1_ubyte=None, t10k_images_idx3_ubyte=None),
        fast=False,
    ),
    Case(
        "mnist: a file cut off",
        MNIST,
        ("t10k-images-idx3-ubyte is damaged: 1000 bytes, expected 7840016", "delete raw/MNIST/raw"),
        setup=raw(t10k_images_idx3_ubyte=1000),
        fast=False,
    ),
    Case(
        "cache: flipped byte",
        ("data.cache=cache",),
        ("test_labels.npy is damaged (checksum differs)", "delete"),
        setup=damaged(flip),
    ),
    Case("cache: cut off", ("data.cache=cache",), (), status=0, setup=damaged(lambda content: content[:-9])),
]

# ---- disks


def images(place: Path, cache: Path) -> None:
    """An image folder of four images."""
    for part in ("train", "val"):
        for colour in ("red", "blue"):
            (place / "images" / part / colour).mkdir(parents=True)
            Image.new("RGB", (9, 9), colour).save(place / "images" / part / colour / "0.png")


MOUNT = "mount -t tmpfs -o size={size} tmpfs disk"
FILL = "head -c 32M /dev/zero > disk/zeros 2> /dev/null"
LONG = ("width=1024", "batch=1024", "epochs=1000", "steps=60", "log.seconds=0.1", "wandb.mode=disabled")
BEGUN = ("run > said & started=$!", "until cat disk/*/attempts/0001/metrics.jsonl; do sleep 0.1; done > /dev/null 2>&1")
LEFT = "find disk -mindepth 1 | sed 's/^/left /'"


def disk(name: str, *words: str, parts: tuple[str, ...], shell: tuple[str, ...]) -> Case:
    return Case(name, words, parts, disk="\n".join(shell))


DISKS = [
    Case("runs: under a file", ("runs=taken/x",), ("taken/x", "is a file"), setup=file("taken", "")),
    disk(
        "disk: full",
        "runs=disk/runs",
        parts=("cannot write disk/runs", "disk is full"),
        shell=(MOUNT.format(size="64k"), FILL, "run", "rm disk/zeros", f"{LEFT} | grep -v 'runs$'"),
    ),
    disk(
        "disk: full while starting",
        "runs=disk",
        parts=("cannot write disk/mnist_pipeline-", "disk is full"),
        shell=(MOUNT.format(size="64k"), "run", LEFT),
    ),
    disk(
        "disk: full from the middle of training on",
        "runs=disk",
        *LONG,
        parts=("metrics.jsonl", "disk is full"),
        shell=(MOUNT.format(size="16M"), *BEGUN, FILL, "wait $started; status=$?"),
    ),
    dataclasses.replace(
        disk(
            "disk: full for a while",
            "runs=disk",
            *LONG,
            parts=("the metrics wait in memory", "rows 60"),
            shell=(
                MOUNT.format(size="16M"),
                *BEGUN,
                FILL,
                "until grep -q WARNING disk/*/attempts/0001/metrics.jsonl said; do sleep 0.1; done 2> /dev/null",
                "rm disk/zeros",
                "wait $started; status=$?; cat said; mkdir -p runs; cp -r disk/* runs",
                "echo rows $(grep -c '\"loss\"' disk/*/attempts/0001/metrics.jsonl)",
            ),
        ),
        status=0,
    ),
    disk(
        "disk: full while preparing",
        "data.cache=disk/cache",
        parts=("cannot write disk/cache", "free space"),
        shell=(MOUNT.format(size="1M"), "run", f"{LEFT} | grep -v -e 'cache$' -e 'lock$'"),
    ),
    dataclasses.replace(
        disk(
            "disk: too small for an image folder",
            *("data.name=imagefolder", "data.root=images", "data.cache=disk/cache", "data.image_size=1024"),
            parts=("4 images of images take 13 MB in disk/cache", "1 MB are free; lower data.image_size", "data.cache"),
            shell=(MOUNT.format(size="1M"), "run", f"{LEFT} | grep -v -e 'cache$' -e 'lock$'"),
        ),
        setup=images,
        experiment="ddp_multinode",
    ),
    disk(
        "disk: read-only",
        "runs=disk/runs",
        parts=("cannot write disk/runs", "disk is read-only"),
        shell=(MOUNT.format(size="64k") + " -o ro", "run"),
    ),
]

# ---- Weights & Biases: the run goes on


def tracked(name: str, *parts: str, **env: str) -> Case:
    return Case(name, (), parts, status=0, env=(("WANDB_MODE", ""), *env.items()))


TRACKING = [
    tracked("W&B: no account", "W&B: offline (no W&B account is configured)"),
    tracked("W&B: malformed key", "W&B: offline (W&B does not accept the account:", WANDB_API_KEY="nonsense"),
    tracked("W&B: refused key", "W&B: offline (", "error 401", WANDB_API_KEY=KEY, WANDB_BASE_URL="REFUSING"),
    tracked("W&B: nobody there", "W&B: offline (", "refused", WANDB_API_KEY=KEY, WANDB_BASE_URL="CLOSED"),
    tracked("W&B: silent host", "W&B: offline (", "does not answer", WANDB_API_KEY=KEY, WANDB_BASE_URL="SILENT"),
]

TYPED = ("unknown key", "WANDB_MODE unknown", "--config is no YAML", "schedule: leaves", "schedule: deadlock")
CASES = [*(case for case in SETTINGS + FILES if case.name in TYPED), *DATA, *DISKS, *TRACKING]


class Refusing(BaseHTTPRequestHandler):
    """A W&B host that knows nobody."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(401)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, str]]:
    """W&B hosts on loopback: one refuses every key, one takes connections and says nothing, one is not there."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            closed = gone.getsockname()[1]
        ports = {"REFUSING": server.server_address[1], "SILENT": silent.getsockname()[1], "CLOSED": closed}
        yield {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    server.shutdown()


@functools.cache
def namespace() -> tuple[list[str], str]:
    """How to start a process with mounts of its own, and why that cannot be done."""
    refusals = []
    for command in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        try:
            trial = [*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
            done = subprocess.run(trial, capture_output=True, text=True, check=False)
        except OSError as error:
            return [], str(error)
        if done.returncode == 0:
            return command, ""
        refusals.append(done.stderr.strip())
    return [], "; ".join(refusals)


def perform(case: Case, place: Path, cache: Path, hosts: dict[str, str]) -> Done:
    """Lay out a case and run it to its end."""
    case.setup(place, cache)
    (place / "disk").mkdir()
    words = [f"runs={place}/runs", "data.test_limit=1000", "epochs=1", "steps=5"]
    words += [f"data.cache={cache}", "data.name=digits"] if case.fast else []
    command = [sys.executable, str(ROOT / "experiments" / f"{case.experiment}.py"), *words, *case.words]
    if not case.script:
        command = [sys.executable, "-m", "slurm.submit", f"--args={' '.join(case.words)}", "--", case.experiment]
    if case.disk:
        text = f"run() {{ {shlex.join(command)}; status=$?; return $status; }}\n{case.disk}\nexit $status\n"
        command = [*namespace()[0], "sh", "-c", text]
    env = {name: hosts.get(value, value) for name, value in case.env}
    done = subprocess.run(
        command,
        cwd=place,
        env=environment(HOME=str(place / "home"), **env),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr, place / "runs")


@pytest.fixture(scope="module")
def answers(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, hosts: dict[str, str], request: pytest.FixtureRequest
) -> Iterator[dict[str, tuple[Path, Future[Done]]]]:
    """The finished process of every case that a selected test asks for, and its folder."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asked = {item.name.partition("[")[2][:-1] for item in items if item.module is request.module}
    with ThreadPoolExecutor(TOGETHER) as pool:
        found = {}
        for case in CASES:
            if case.name in asked and not (case.disk and namespace()[1]):
                place = tmp_path_factory.mktemp("case")
                found[case.name] = (place, pool.submit(perform, case, place, cache, hosts))
        yield found


@pytest.mark.parametrize("case", SETTINGS + FILES, ids=lambda case: case.name)
def test_bad_settings(case: Case, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case.setup(tmp_path, cache)
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    for name, value in case.env:
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:  # --dry-run, so that nothing would start if it were not refused
        submit.main(["--dry-run=1", f"--args={' '.join(case.words)}", "--", case.experiment])
    assert all(part in str(caught.value) for part in case.parts), caught.value
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input(case: Case, answers: dict[str, tuple[Path, Future[Done]]]) -> None:
    if case.disk and namespace()[1]:
        pytest.skip(f"NOT TESTED, no mount namespace can be had here: {namespace()[1]}")
    place, future = answers[case.name]
    done = future.result()
    said = done.out + done.err
    assert "Traceback" not in said, said
    assert done.status == case.status, said
    assert not processes_of(str(place))
    if case.status:
        (message,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
        assert all(part in message for part in case.parts), message
        assert "left" not in said
        assert not list(done.runs.glob("*"))
    else:
        assert all(part in said for part in case.parts), said
        assert done.folder.result["state"] == "finished"
        written = [path for path in done.folder.path.rglob("*") if path.is_file()]
        assert not [path for path in written if KEY.encode() in path.read_bytes()]
