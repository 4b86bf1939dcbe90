"""make rerun: a repetition is equal to the bit, or what differs is named, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config import config, custom_code
from common.data import prepare
from common.data.prepare import PreparedDataset
from common.runs import provenance
from common.runs.folder import RunFolder, write_json
from common.system.errors import UserError
from configs import ddp_multinode, mnist_pipeline
from configs.profile import Profile
from slurm.launch import rerun
from tests.harness import inside, warm
from tests.harness.made_runs import Made
from tests.harness.own_data import write_example, write_schedule
from tests.harness.processes import environment, run
from tests.harness.registry import EXPERIMENTS
from tests.harness.warm import ROOT

QUICK = ("steps=12", "data.test_limit=100", "log.progress=none")


def differing(out: str) -> list[str]:
    return re.findall(r"^differs     (.*)", out, re.MULTILINE)


def test_a_repetition_is_equal_to_the_bit_from_its_own_source(tmp_path: Path) -> None:
    """On a data set and a schedule of one's own, whose files and arrays are gone meanwhile."""
    file, order = write_example(tmp_path), write_schedule(tmp_path)
    words = (f"data.name={file}:load", f"data.cache={tmp_path / 'sets'}", f"schedule={order}:own", *QUICK)
    old = run("mnist_pipeline", *words, runs=tmp_path / "runs").folder.path
    file.unlink()
    order.unlink()
    shutil.rmtree(tmp_path / "sets")
    script = old / "code" / "experiments" / "mnist_pipeline.py"
    script.write_text(script.read_text() + "# as it was then\n")
    (old / "code" / provenance.CHECKSUMS).unlink()
    meta = json.loads((old / "meta.json").read_text())
    write_json(old / "meta.json", meta | {"packages": meta["packages"] | {"numpy": "1.0"}})
    done = warm.execute([sys.executable, "-m", "slurm", "rerun", "--", str(old)], env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert differing(done.stdout) == [f"package numpy: was 1.0, now {np.__version__}"]
    assert "losses      bitwise equal in 12 steps" in done.stdout
    assert "result      bitwise equal: test_loss, test_accuracy" in done.stdout
    (path,) = (path for path in old.parent.iterdir() if path != old)
    new = RunFolder(path)
    assert (
        new.read_metrics()[3]["loss"] == RunFolder(old).read_metrics()[3]["loss"] and new.result["state"] == "finished"
    )
    assert (new.path / "code" / "experiments" / "mnist_pipeline.py").read_text() == script.read_text()
    assert (new.path / "code" / "own" / "data.py").read_text() == (old / "code" / "own" / "data.py").read_text()
    meta = json.loads((new.path / "meta.json").read_text())
    assert meta["repeats"] == old.name and meta["packages"]["numpy"] == np.__version__


def test_a_repetition_on_another_data_set_of_ones_own_keeps_that_file(tmp_path: Path) -> None:
    old = Made("ddp_multinode", 1, 20).write(tmp_path / "old")
    (old.path / "code" / "own").mkdir(parents=True)
    (old.path / "code" / "own" / "data.py").write_text("the file of then")
    file = write_example(tmp_path)
    words = [f"data.name={file}:load", f"data.cache={tmp_path / 'sets'}", f"runs={tmp_path / 'new'}"]
    settings = config.load_config(ddp_multinode.Config, words, {})
    found = prepare.prepare_dataset(settings.data)
    new = rerun.create_rerun_folder(old, config.format_yaml(settings), settings, found)
    assert (new.path / "code" / "own" / "data.py").read_text() == file.read_text()


def test_a_repetition_with_a_schedule_that_is_named_keeps_that_file(tmp_path: Path) -> None:
    order = write_schedule(tmp_path)
    words = [f"schedule={order}:own", f"runs={tmp_path / 'new'}"]
    settings = config.load_config(mnist_pipeline.Config, words, {})
    old = Made("mnist_pipeline", 1, 20).write(tmp_path / "old")
    provenance.copy_custom_files(settings, old.path / "code")
    order = write_schedule(tmp_path, "FBW")
    found = PreparedDataset("digits", tmp_path, {})
    for named in ([], ["schedule"]):
        new = rerun.create_rerun_folder(old, config.format_yaml(settings), settings, found, overridden=named)
        (kept,) = (new.path / "code" / "own").iterdir()
        assert (kept.read_text() == order.read_text()) is bool(named)
    with pytest.raises(UserError, match=f"schedule={order}:own: {order}:1: invalid action .'W', 0, 0. on rank 0"):
        custom_code.check_custom_settings(settings)
    custom_code.check_custom_settings(settings, old.path / "code")


def test_a_repetition_keeps_the_file_of_an_algorithm_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    moves = "[[('add', 0, 1), ('send', 0, 1)], [('send', 0, 0), ('receive', 0, 0)]]"
    own.write_text(f"def star(ranks):\n    return {moves}\n")
    words = ["launch.backend=builtin", f"launch.algorithm={own}:star", f"runs={tmp_path / 'new'}"]
    settings = config.load_config(ddp_multinode.Config, words, {})
    old = Made("ddp_multinode", 1, 20).write(tmp_path / "old")
    provenance.copy_custom_files(settings, old.path / "code")
    own.write_text("def star(ranks):\n    return [[], []]\n")
    found = PreparedDataset("digits", tmp_path, {})
    for named in ([], ["launch.algorithm"]):
        new = rerun.create_rerun_folder(old, config.format_yaml(settings), settings, found, overridden=named)
        (kept,) = (new.path / "code" / "own").iterdir()
        assert (kept.read_text() == own.read_text()) is bool(named)
    with pytest.raises(UserError, match=f"launch.algorithm={own}:star: .* rank 0 ends without the values of rank 1"):
        custom_code.check_custom_settings(settings)
    custom_code.check_custom_settings(settings, old.path / "code")


def test_a_repetition_keeps_the_files_of_an_optimizer_and_a_decay_of_ones_own(tmp_path: Path) -> None:
    files = write_example(tmp_path, "lion.py"), write_example(tmp_path, "halving.py")
    words = [f"optim.name={files[0]}:Lion", f"optim.decay={files[1]}:halve", f"runs={tmp_path / 'new'}"]
    settings = config.load_config(ddp_multinode.Config, words, {})
    old = Made("ddp_multinode", 1, 20).write(tmp_path / "old")
    provenance.copy_custom_files(settings, old.path / "code")
    for file in files:
        file.write_text("def halve(step, total):\n    return -1\n")
    found = PreparedDataset("digits", tmp_path, {})
    for named in ([], ["optim.name"], ["optim.decay"]):
        new = rerun.create_rerun_folder(old, config.format_yaml(settings), settings, found, overridden=named)
        decay, optimizer = sorted((new.path / "code" / "own").iterdir())
        assert (optimizer.read_text() == files[0].read_text()) is ("optim.name" in named)
        assert (decay.read_text() == files[1].read_text()) is ("optim.decay" in named)
    for code, named in ((None, []), (old.path / "code", ["optim.decay"])):
        with pytest.raises(UserError, match=f"optim.decay={files[1]}:halve: .* the function returned -1 for step 0"):
            custom_code.check_custom_settings(settings, code, named)
    custom_code.check_custom_settings(settings, old.path / "code")


def test_a_repetition_with_other_steps_is_not_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = Made("mnist_pipeline", 1, 20).write(tmp_path / "old")
    for steps, equal in ((20, True), (19, False), (21, False)):
        new = RunFolder(tmp_path / f"new-{steps}" / old.path.name)
        shutil.copytree(old.path, new.path)
        (attempt,) = new.list_attempts()
        lines = [line for line in attempt.metrics_file.read_text().splitlines(keepends=True) if '"loss"' in line]
        more = lines[-1].replace('"global_step": 20', '"global_step": 21')
        attempt.metrics_file.write_text("".join([*lines, more][:steps]))
        assert rerun.compare_runs(old, new) is equal
        assert (f"20 steps in the old run, {steps} in the new run" in capsys.readouterr().out) is not equal


def test_one_flipped_byte_of_the_prepared_data_is_named(cache: Path, tmp_path: Path) -> None:
    shutil.copytree(cache, tmp_path / "data")
    words = ("data.name=digits", f"data.cache={tmp_path / 'data'}", *QUICK)
    old = run("mnist_pipeline", *words, runs=tmp_path / "runs").folder.path
    (file,) = (tmp_path / "data").glob("digits-*/train_labels.npy")
    raw = bytearray(file.read_bytes())
    raw[500] ^= 1
    file.write_bytes(raw)
    done = inside.run_verb("rerun", "--", str(old))
    assert done.returncode == 2
    (line,) = differing(done.stdout)
    assert line.startswith(f"data train_labels of digits (sha256 of {file}): was ")
    assert f"error: {file} is damaged" in done.stderr and done.stderr.count("\n") == 1
    assert list(old.parent.iterdir()) == [old] and "\nsame " not in done.stdout
    done = inside.run_verb("rerun", "--args=seed=1", "--", str(old))
    assert differing(done.stdout) == ["seed: was 0, now 1", line]
    meta = json.loads((old / "meta.json").read_text())
    write_json(old / "meta.json", meta | {"data": {}})  # nothing tells what the data were
    done = inside.run_verb("rerun", "--", str(old))
    assert not differing(done.stdout) and "\nsame        settings, source, versions, and machine\n" in done.stdout


def test_how_far_losses_lead_apart_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = (Made(number=number, steps=10).write(tmp_path) for number in range(2))
    text = old.list_attempts()[0].metrics_file.read_text()
    new.list_attempts()[0].metrics_file.write_text(text)
    assert rerun.compare_runs(old, new)
    assert "losses      bitwise equal in 10 steps\n" in capsys.readouterr().out
    rows = [json.loads(line) for line in text.splitlines()]
    for row in rows:
        if "loss" in row and row["global_step"] in (4, 7, 9):
            row["loss"] += {4: 0.25, 7: 0.5, 9: 0.125}[row["global_step"]]
    new.list_attempts()[0].metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert not rerun.compare_runs(old, new)
    found = re.search(
        r"losses      differ in 3 of 10 steps, first in step 4, by at most (\S+) \(step 7\)", capsys.readouterr().out
    )
    assert found and float(found[1]) == pytest.approx(0.5, rel=1e-2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "'nothing': no such run folder"),
        ([], "RUN is missing; set RUN=<id>"),
        (["--args=seed=x", "{old}"], "seed=x: expected an integer"),
        (["--args=sed=1", "{old}"], "unknown key sed; did you mean seed?"),
        (["--args=--help", "{old}"], "ARGS: --help is not a setting; expected key=value"),
        (["--args=seed=1 --print-config", "{old}"], "ARGS: --print-config is not a setting"),
        (["--launch=nowhere", "{old}"], "LAUNCH=nowhere is unknown"),
        (["{bare}"], "no longer has its source code in code/"),
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
    done = inside.run_verb("rerun", *[w for w in words if w[0] == "-"], "--", *[w for w in words if w[0] != "-"])
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    assert len(list(tmp_path.iterdir())) == 2


def test_a_run_that_goes_on_is_neither_repeated_nor_resumed(tmp_path: Path) -> None:
    run = Made("mnist_pipeline", state="running").write(tmp_path).path
    repeated = inside.run_verb("rerun", "--", str(run))
    remedy = f"wait until the run has ended (make status RUN={run} WAIT=600)"
    assert repeated.returncode == 2 and repeated.stderr == f"error: {run.name} is RUNNING; {remedy}\n"
    resumed = inside.run_verb("exp", f"--resume={run}")
    remedy = f"to resume the run elsewhere, first run make cancel RUN={run}"
    assert resumed.returncode == 2 and resumed.stderr == f"error: {run.name} is RUNNING; {remedy}\n"
    assert list(tmp_path.iterdir()) == [run]


ENDING = {"format": 2, "state": "finished", "exit_status": 0, "data": "digits"}
MEASURED: dict[str, dict[str, Any]] = {
    "timings": {"samples_per_second": 1.0, "step_seconds": 1.0}, "memory": {"rank 0": 1},
    "measured": {"idle_share": [0.1], "timeline": [{"start": 0.0}], "export": "/runs/a/model.pt2", "export_bytes": 1},
}  # fmt: skip
SCORES = {"test_loss": 0.5, "test_accuracy": 0.9, "test_samples": 100}
OUTCOME = {
    "final_loss": 0.25, "bytes_sent": 8.0, "steps_skipped": 0, "nonzero": 80, "weights": 100, "sparsity": 0.2,
    "masks": "ab12", "bytes_raw": 400, "int8_accuracy": 0.9, "ideal_bubble": 0.2, "last_batch": [3, 2],
    "computed_in": "fp32",
}  # fmt: skip


def test_all_that_depends_on_the_training_alone_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = (Made(number=number, steps=10).write(tmp_path) for number in range(2))
    shutil.copy(old.list_attempts()[0].metrics_file, new.list_attempts()[0].metrics_file)
    trained = SCORES | OUTCOME | {"data": "digits"}
    write_json(old.path / "result.json", ENDING | MEASURED | {"scores": SCORES, "outcome": OUTCOME})
    other = ENDING | {group: dict.fromkeys(values, "another") for group, values in MEASURED.items()}
    write_json(new.path / "result.json", other | {"scores": SCORES, "outcome": OUTCOME})
    assert rerun.compare_runs(old, new)
    assert f"result      bitwise equal: {', '.join(trained)}\n" in capsys.readouterr().out
    for key, value in trained.items():
        changed = value + 0.5 if isinstance(value, int | float) else "another"
        groups = {
            "scores": SCORES | ({key: changed} if key in SCORES else {}),
            "outcome": OUTCOME | ({key: changed} if key in OUTCOME else {}),
            "data": changed if key == "data" else "digits",
        }
        write_json(new.path / "result.json", other | groups)
        assert not rerun.compare_runs(old, new)
        apart = ", 0.5 apart" if isinstance(value, int | float) else ""
        said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("result")]
        assert said == [f"result      {key}: was {value}, now {changed}{apart}"]


@pytest.mark.parametrize("name", [entry.name for entry in EXPERIMENTS if not entry.trains])
def test_settings_for_training_of_an_older_measurement_do_not_differ(name: str, tmp_path: Path) -> None:
    old = Made(name, 1, 4).write(tmp_path)
    text = (old.path / "config.yaml").read_text()
    (old.path / "config.yaml").write_text(f"{text}batch: 64\ndata:\n  name: none\n")
    write_json(old.path / "meta.json", {})
    words = [f"--config={old.path / 'config.yaml'}", "seed=3"]
    settings = config.load_config(config.import_schema(name), words, {})
    found = rerun.list_differences(old, config.format_yaml(settings), settings, prepare.NO_DATA, None)
    differing = [name for name, old_value, new_value in found if old_value not in (None, new_value)]
    assert differing == ["seed"]


def test_words_for_the_cluster_are_laid_over_the_runs_own_profile(tmp_path: Path) -> None:
    own = Profile(partition="long", gpus=2, gpus_as="gres", requeue=False, memory_gb=1.5, setup=["module load cuda"])
    write_json(tmp_path / "meta.json", {"job": {"id": "7", "scheduler": "local", "profile": vars(own) | {"gone": 1}}})
    old = RunFolder(tmp_path)
    assert rerun.choose_cluster_profile(old, "", []) == own
    longer = rerun.choose_cluster_profile(old, "", ["cluster.time=120"])
    assert longer == dataclasses.replace(own, time=120)
    assert rerun.choose_cluster_profile(old, "default", ["cluster.time=120"]).partition == ""
    with pytest.raises(UserError, match="did you mean partition"):
        rerun.choose_cluster_profile(old, "", ["cluster.partion=x"])


def test_a_loss_that_is_no_number_is_as_far_as_can_be() -> None:
    assert rerun.compute_distance(None, None) == 0 and rerun.compute_distance(1.0, None) == float("inf")
    assert rerun.compute_distance(1.0, 1.5) == 0.5
