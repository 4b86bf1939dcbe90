"""`make rerun`: a repetition is equal to the bit, or what differs is named, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common.config import UserError
from common.folder import Folder, write_json
from common.prepare import RAW
from configs.profile import Profile
from slurm import rerun
from tests.harness.made_runs import Made
from tests.harness.processes import ROOT, Done, environment, run

QUICK = ("steps=12", "data.test_limit=100", "log.progress=none")


def make_rerun(place: Path, folder: Path, *words: str) -> Done:
    done = subprocess.run(
        ["make", "rerun", f"RUN={folder}", *words],
        cwd=place,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr, folder.parent)


def differing(done: Done) -> list[str]:
    return re.findall(r"^differs     (.*)", done.out, re.MULTILINE)


def new_of(old: Path) -> Folder:
    """The repetition, which is taken away so that the next one is alone again."""
    (path,) = [path for path in old.parent.iterdir() if path != old]
    return Folder(path)


@pytest.fixture
def old(tmp_path: Path, cache: Path) -> Path:
    """A finished run, with data of its own that may be damaged."""
    shutil.copytree(cache, tmp_path / "data")
    words = ("data.name=digits", f"data.cache={tmp_path / 'data'}", *QUICK)
    return run("mnist_pipeline", *words, runs=tmp_path / "runs").folder.path


def test_a_repetition_is_equal_to_the_bit_from_its_own_source(old: Path, place: Path) -> None:
    script = old / "code" / "experiments" / "mnist_pipeline.py"
    script.write_text(script.read_text() + "# as it was then\n")
    meta = json.loads((old / "meta.json").read_text())
    write_json(old / "meta.json", meta | {"packages": meta["packages"] | {"numpy": "1.0"}})
    done = make_rerun(place, old)
    assert done.status == 0, done.out + done.err
    assert differing(done) == [f"package numpy: then 1.0, now {np.__version__}"]
    assert "losses      equal to the bit in 12 steps" in done.out
    assert "result      equal to the bit: test_loss, test_accuracy" in done.out
    new = new_of(old)
    assert new.metrics()[3]["loss"] == Folder(old).metrics()[3]["loss"] and new.result["state"] == "finished"
    assert (new.path / "code" / "experiments" / "mnist_pipeline.py").read_text() == script.read_text()
    meta = json.loads((new.path / "meta.json").read_text())
    assert meta["repeats"] == old.name and meta["packages"]["numpy"] == np.__version__


def test_another_seed_is_named_and_how_far_it_leads(old: Path, place: Path) -> None:
    done = make_rerun(place, old, "ARGS=seed=1")
    assert done.status != 0 and f"Error {rerun.DIFFERENT}" in done.err, done.out + done.err
    assert differing(done) == ["seed: then 0, now 1"]
    found = re.search(r"differ in 12 of 12 steps, first in step 1, by at most (\S+) \(step (\d+)\)", done.out)
    assert found, done.out
    then, now = ([row["loss"] for row in f.metrics() if "loss" in row] for f in (Folder(old), new_of(old)))
    gaps = [abs(a - b) for a, b in zip(then, now, strict=True)]
    assert float(found[1]) == pytest.approx(max(gaps), rel=1e-2) and gaps[int(found[2]) - 1] == max(gaps)
    assert re.search(r"result      test_loss: then \S+, now \S+, \S+ apart", done.out)


def test_one_flipped_byte_of_the_prepared_data_is_named(old: Path, place: Path, tmp_path: Path) -> None:
    (file,) = (tmp_path / "data").glob("digits-*/train_labels.npy")
    raw = bytearray(file.read_bytes())
    raw[500] ^= 1
    file.write_bytes(raw)
    done = make_rerun(place, old)
    assert done.status != 0 and "Error 2" in done.err
    (line,) = differing(done)
    assert line.startswith(f"data train_labels of digits (sha256 of {file}): then ")
    assert f"error: {file} is damaged" in done.err and "Traceback" not in done.err
    assert list(old.parent.iterdir()) == [old]


def test_one_flipped_byte_of_the_source_of_the_data_is_named(place: Path, tmp_path: Path) -> None:
    random, raw = np.random.default_rng(0), tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, size in RAW.items():
        count = (size - 16) // 784 if "images" in name else size - 8
        head = [2051, count, 28, 28] if "images" in name else [2049, count]
        body = random.integers(0, 255 if "images" in name else 10, size - 4 * len(head), dtype=np.uint8)
        (raw / name).write_bytes(np.array(head, ">i4").tobytes() + body.tobytes())
    words = (f"data.root={tmp_path}", f"data.cache={tmp_path / 'data'}", *QUICK)
    old = run("mnist_pipeline", *words, runs=tmp_path / "runs").folder.path
    with open(raw / "t10k-images-idx3-ubyte", "r+b") as file:
        file.seek(16 + 300)
        byte = file.read(1)[0]
        file.seek(16 + 300)
        file.write(bytes([byte ^ 128]))
    done = make_rerun(place, old)
    assert f"Error {rerun.DIFFERENT}" in done.err, done.out + done.err
    (line,) = differing(done)
    assert line.startswith("data test_images of mnist")
    assert "losses      equal to the bit in 12 steps" in done.out and "result      test_loss: then " in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "'nothing': no such run folder"),
        ([], "RUN is missing; write RUN=<id>"),
        (["--args=seed=x", "{old}"], "seed=x: write a whole number"),
        (["--args=sed=1", "{old}"], "unknown key sed; did you mean seed?"),
        (["--args=--help", "{old}"], "ARGS: --help is no setting; write key=value here"),
        (["--args=seed=1 --print-config", "{old}"], "ARGS: --print-config is no setting"),
        (["--launch=nowhere", "{old}"], "LAUNCH=nowhere is unknown"),
        (["{bare}"], "has no source in code/ any more"),
    ],
)
def test_what_cannot_be_repeated_is_refused(tmp_path: Path, words: list[str], message: str) -> None:
    for name in ("mnist_pipeline-20260101-000000-aaaa", "mnist_pipeline-20260101-000000-bbbb"):
        (tmp_path / name).mkdir()
        shutil.copy(ROOT / "configs" / "mnist_pipeline.yaml", tmp_path / name / "config.yaml")
        write_json(tmp_path / name / "result.json", {"state": "finished"})
    old, bare = sorted(tmp_path.iterdir())
    for name in ("experiments", "common", "slurm", "configs"):
        shutil.copytree(ROOT / name, old / "code" / name)
    words = [word.format(old=old, bare=bare) for word in words]
    command = [sys.executable, "-m", "slurm.rerun", *[w for w in words if w[0] == "-"], "--"]
    command += [w for w in words if w[0] != "-"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    assert len(list(tmp_path.iterdir())) == 2


MEASURED = {
    "state": "finished", "exit_status": 0, "samples_per_second": 1.0, "step_seconds": 1.0, "training_memory": 1,
    "peak_memory": {"process 0": 1}, "peak_memory_0": 1, "memory_megabytes": [1.0], "idle_share": [0.1],
    "idle_share_1": 0.1, "timeline": [{"start": 0.0}], "communication_seconds": 1.0, "communication_exposed": 1.0,
    "alone_step_seconds": 1.0, "efficiency": 1.0, "imbalance": {"memory": 1.0}, "ranks": [{"step": 1.0}],
    "straggler": 1, "compare": {"ddp": [1.0]}, "stages": [["fc1"]], "csr_seconds": 1.0, "export": "/runs/a/model.pt2",
    "export_bytes": 1,
}  # fmt: skip
TRAINED = {
    "test_loss": 0.5, "test_accuracy": 0.9, "test_samples": 100, "final_loss": 0.25, "bytes_sent": 8.0,
    "steps_skipped": 0, "nonzero": 80, "weights": 100, "sparsity": 0.2, "masks": "ab12", "bytes_raw": 400,
    "int8_accuracy": 0.9, "ideal_bubble": 0.2, "last_batch": [3, 2], "data": "digits", "computed_in": "fp32",
}  # fmt: skip


def test_all_that_depends_on_the_training_alone_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = (Made(number=number, steps=10).write(tmp_path) for number in range(2))
    shutil.copy(old.attempts()[0].metrics_file, new.attempts()[0].metrics_file)
    write_json(old.path / "result.json", MEASURED | TRAINED)
    other = {key: value if key == "state" else "measured anew" for key, value in MEASURED.items()}
    write_json(new.path / "result.json", other | TRAINED)
    assert rerun.compare(old, new)
    assert f"result      equal to the bit: {', '.join(TRAINED)}\n" in capsys.readouterr().out
    for key, value in TRAINED.items():
        changed = value + 0.5 if isinstance(value, int | float) else "another"
        write_json(new.path / "result.json", other | TRAINED | {key: changed})
        assert not rerun.compare(old, new)
        apart = ", 0.5 apart" if isinstance(value, int | float) else ""
        said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("result")]
        assert said == [f"result      {key}: then {value}, now {changed}{apart}"]


def test_words_for_the_cluster_are_laid_over_the_runs_own_profile(tmp_path: Path) -> None:
    own = Profile(partition="long", gpus=2, gpus_as="gres", requeue=False, memory_gb=1.5, setup=["module load cuda"])
    write_json(tmp_path / "meta.json", {"job": {"profile": vars(own) | {"gone": 1}}})
    old = Folder(tmp_path)
    assert rerun.profile_of(old, "", []) == own
    longer = rerun.profile_of(old, "", ["cluster.time=120"])
    assert longer == dataclasses.replace(own, time=120)
    assert rerun.profile_of(old, "default", ["cluster.time=120"]).partition == ""
    with pytest.raises(UserError, match="did you mean partition"):
        rerun.profile_of(old, "", ["cluster.partion=x"])


def test_a_loss_that_is_no_number_is_as_far_as_can_be() -> None:
    assert rerun.apart(None, None) == 0 and rerun.apart(1.0, None) == float("inf")
    assert rerun.apart(1.0, 1.5) == 0.5
