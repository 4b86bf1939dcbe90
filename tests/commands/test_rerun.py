"""make rerun: a repetition is equal to the bit, or exactly the differences are listed."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from common.config import config, custom_code
from common.data import prepare
from common.data.prepare import PreparedDataset
from common.runs import provenance
from common.runs.folder import RunFolder, read_json, write_json
from common.system.errors import UserError
from configs import ddp_multinode
from configs.profile import Profile
from configs.shared import TrainingExperiment
from slurm.launch import rerun
from tests.harness.commands import in_process_calls
from tests.harness.commands.processes import execute_verb, run_experiment
from tests.harness.custom_code.examples import write_example, write_schedule
from tests.harness.environment.randomness import draw_cases
from tests.harness.experiments.registry import MEASUREMENTS
from tests.harness.repository import ROOT
from tests.harness.runs.synthetic_runs import SyntheticRun, write_rows

QUICK = ("steps=12", "data.test_limit=100", "log.progress=none")


def differing(out: str) -> list[str]:
    return re.findall(r"^differs     (.*)", out, re.MULTILINE)


def test_a_repetition_is_equal_to_the_bit_from_its_own_source(tmp_path: Path) -> None:
    """The run has a custom data set and schedule, whose files and arrays have been deleted."""
    file = write_example(tmp_path)
    order = write_schedule(tmp_path)
    settings = (f"data.name={file}:load", f"data.cache={tmp_path / 'sets'}", f"schedule={order}:own", *QUICK)
    old = run_experiment("mnist_pipeline", *settings, runs=tmp_path / "runs").folder.path
    file.unlink()
    order.unlink()
    shutil.rmtree(tmp_path / "sets")
    script = old / "code/experiments/mnist_pipeline.py"
    script.write_text(script.read_text() + "# as it was then\n")
    (old / "code" / provenance.CHECKSUMS).unlink()
    meta = read_json(old / "meta.json")
    write_json(old / "meta.json", meta | {"packages": meta["packages"] | {"numpy": "1.0"}})
    completed = execute_verb("rerun", "--", str(old), status=0)
    assert differing(completed.stdout) == [f"package numpy: was 1.0, now {np.__version__}"]
    assert "losses      bitwise equal in 12 steps" in completed.stdout
    assert "result      bitwise equal: test_loss, test_accuracy" in completed.stdout
    (path,) = set(old.parent.iterdir()) - {old}
    new = RunFolder(path)
    assert new.read_metrics()[3]["loss"] == RunFolder(old).read_metrics()[3]["loss"]
    assert new.result["state"] == "finished"
    assert (new.path / "code/experiments/mnist_pipeline.py").read_text() == script.read_text()
    assert (new.path / "code/own/data.py").read_text() == (old / "code/own/data.py").read_text()
    meta = read_json(new.path / "meta.json")
    assert meta["repeats"] == old.name
    assert meta["packages"]["numpy"] == np.__version__


def test_a_run_whose_source_code_python_could_not_find_is_refused(tmp_path: Path) -> None:
    old = SyntheticRun("ddp_multinode", 1, 20).write(tmp_path / "14:30")
    provenance.copy_source(old)
    with pytest.raises(UserError, match=r"14:30/.*: the path must not contain ':'; move the run to another folder"):
        rerun.resolve_settings(old, [])


def test_a_repetition_on_another_custom_data_set_stores_its_file(tmp_path: Path) -> None:
    old = SyntheticRun("ddp_multinode", 1, 20).write(tmp_path / "old")
    (old.path / "code/own").mkdir(parents=True)
    (old.path / "code/own/data.py").write_text("the file of then")
    file = write_example(tmp_path)
    settings = [f"data.name={file}:load", f"data.cache={tmp_path / 'sets'}", f"runs={tmp_path / 'new'}"]
    cfg = config.load_config(ddp_multinode.Config, settings, {})
    prepared = prepare.prepare_dataset(cfg.data)
    new = rerun.create_rerun_folder(old, config.format_yaml(cfg), cfg, prepared)
    assert (new.path / "code/own/data.py").read_text() == file.read_text()


def make_run_with_custom_files(experiment: str, tmp_path: Path, *settings: str) -> tuple[RunFolder, Any]:
    """Return the folder of a run that stores the custom files of its settings, and the config of a repetition."""
    arguments = [*settings, f"runs={tmp_path / 'new'}"]
    cfg = config.load_config(config.import_schema(experiment), arguments, {})
    old = SyntheticRun(experiment, 1, 20).write(tmp_path / "old")
    provenance.copy_custom_files(cfg, old.path / "code")
    return old, cfg


def read_stored_files(old: RunFolder, cfg: TrainingExperiment, overridden: Sequence[str] = ()) -> list[str]:
    """Return the texts of the custom files that a repetition stores, sorted by the names of the files."""
    prepared = PreparedDataset("digits", old.path, {})
    new = rerun.create_rerun_folder(old, config.format_yaml(cfg), cfg, prepared, overridden=overridden)
    return [path.read_text() for path in sorted((new.path / "code/own").iterdir())]


def test_a_repetition_stores_the_file_of_an_overridden_schedule(tmp_path: Path) -> None:
    order = write_schedule(tmp_path)
    old_text = order.read_text()
    old, cfg = make_run_with_custom_files("mnist_pipeline", tmp_path, f"schedule={order}:own")
    order = write_schedule(tmp_path, "FBX")
    assert read_stored_files(old, cfg) == [old_text]
    assert read_stored_files(old, cfg, ["schedule"]) == [order.read_text()]
    with pytest.raises(UserError, match=f"schedule={order}:own: {order}:1: invalid action .'X', 0, 0. on rank 0"):
        custom_code.check_custom_settings(cfg)
    custom_code.check_custom_settings(cfg, old.path / "code")


def test_a_repetition_stores_the_file_of_a_custom_algorithm(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    moves = "[[('add', 0, 1), ('send', 0, 1)], [('send', 0, 0), ('receive', 0, 0)]]"
    old_text = f"def star(ranks):\n    return {moves}\n"
    file.write_text(old_text)
    settings = ("launch.backend=builtin", f"launch.algorithm={file}:star")
    old, cfg = make_run_with_custom_files("ddp_multinode", tmp_path, *settings)
    file.write_text("def star(ranks):\n    return [[], []]\n")
    assert read_stored_files(old, cfg) == [old_text]
    assert read_stored_files(old, cfg, ["launch.algorithm"]) == [file.read_text()]
    with pytest.raises(UserError, match=f"launch.algorithm={file}:star: .* rank 0 ends without the values of rank 1"):
        custom_code.check_custom_settings(cfg)
    custom_code.check_custom_settings(cfg, old.path / "code")


def test_a_repetition_stores_the_files_of_a_custom_optimizer_and_decay(tmp_path: Path) -> None:
    optimizer = write_example(tmp_path, "lion.py")
    decay = write_example(tmp_path, "halving.py")
    old_optimizer_text = optimizer.read_text()
    old_decay_text = decay.read_text()
    settings = (f"optim.name={optimizer}:Lion", f"optim.decay={decay}:halve")
    old, cfg = make_run_with_custom_files("ddp_multinode", tmp_path, *settings)
    new_text = "def halve(step, total):\n    return -1\n"
    optimizer.write_text(new_text)
    decay.write_text(new_text)
    assert read_stored_files(old, cfg) == [old_decay_text, old_optimizer_text]
    assert read_stored_files(old, cfg, ["optim.name"]) == [old_decay_text, new_text]
    assert read_stored_files(old, cfg, ["optim.decay"]) == [new_text, old_optimizer_text]
    message = f"optim.decay={decay}:halve: .* the function returned -1 for step 0"
    with pytest.raises(UserError, match=message):
        custom_code.check_custom_settings(cfg)
    with pytest.raises(UserError, match=message):
        custom_code.check_custom_settings(cfg, old.path / "code", ["optim.decay"])
    custom_code.check_custom_settings(cfg, old.path / "code")


def test_a_repetition_with_other_steps_is_not_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = SyntheticRun("mnist_pipeline", 1, 20).write(tmp_path / "old")
    for steps, equal in ((20, True), (19, False), (21, False)):
        new = RunFolder(tmp_path / f"new-{steps}" / old.path.name)
        shutil.copytree(old.path, new.path)
        (attempt,) = new.list_attempts()
        lines = [line for line in attempt.metrics_file.read_text().splitlines(keepends=True) if '"loss"' in line]
        lines.append(lines[-1].replace('"global_step": 20', '"global_step": 21'))
        attempt.metrics_file.write_text("".join(lines[:steps]))
        assert rerun.compare_runs(old, new) is equal
        assert (f"20 steps in the old run, {steps} in the new run" in capsys.readouterr().out) is not equal


@pytest.mark.slow
def test_one_flipped_byte_of_the_prepared_data_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "count_visible_gpus", lambda: 1)  # too few for two ranks, which use CPUs again
    shutil.copytree(cache, tmp_path / "data")
    settings = ("data.name=digits", f"data.cache={tmp_path / 'data'}", *QUICK)
    old = run_experiment("mnist_pipeline", *settings, runs=tmp_path / "runs").folder.path
    (file,) = (tmp_path / "data").glob("digits-*/train_labels.npy")
    raw = bytearray(file.read_bytes())
    raw[500] ^= 1
    file.write_bytes(raw)
    completed = in_process_calls.call_verb("rerun", "--", str(old), status=2)
    (line,) = differing(completed.stdout)
    assert line.startswith(f"data train_labels of digits (sha256 of {file}): was ")
    assert f"error: {file} is damaged" in completed.stderr
    assert completed.stderr.count("\n") == 1
    assert list(old.parent.iterdir()) == [old]
    assert "\nsame " not in completed.stdout
    completed = in_process_calls.call_verb("rerun", "--args=seed=1", "--", str(old), status=2)
    assert differing(completed.stdout) == ["seed: was 0, now 1", line]
    meta = read_json(old / "meta.json")
    write_json(old / "meta.json", meta | {"data": {}})  # nothing tells what the data were
    completed = in_process_calls.call_verb("rerun", "--", str(old), status=2)
    assert not differing(completed.stdout)
    assert "\nsame        settings, source, versions, and machine\n" in completed.stdout


def test_the_largest_difference_of_losses_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = SyntheticRun(number=0, steps=10).write(tmp_path)
    new = SyntheticRun(number=1, steps=10).write(tmp_path)
    text = old.list_attempts()[0].metrics_file.read_text()
    new.list_attempts()[0].metrics_file.write_text(text)
    assert rerun.compare_runs(old, new)
    assert "losses      bitwise equal in 10 steps\n" in capsys.readouterr().out
    rows = [json.loads(line) for line in text.splitlines()]
    changes = {4: 0.25, 7: 0.5, 9: 0.125}
    for row in rows:
        if "loss" in row:
            row["loss"] += changes.get(row["global_step"], 0)
    write_rows(new.list_attempts()[0], rows)
    assert not rerun.compare_runs(old, new)
    expected = r"losses      differ in 3 of 10 steps, first in step 4, by at most (\S+) \(step 7\)"
    match = re.search(expected, capsys.readouterr().out)
    assert match
    assert float(match[1]) == pytest.approx(0.5, rel=1e-2)


REFUSED_ARGUMENTS = {
    "-- nothing": "'nothing': no such run folder",
    "--": "RUN is missing; set RUN=<id>",
    "--args=seed=x -- {old}": "seed=x: expected an integer",
    "--args=sed=1 -- {old}": "unknown key sed; did you mean seed?",
    "--args=--help -- {old}": "ARGS: --help is not a setting; expected key=value",
    "'--args=seed=1 --print-config' -- {old}": "ARGS: --print-config is not a setting",
    "--launch=nowhere -- {old}": "LAUNCH=nowhere is unknown",
    "-- {bare}": "no longer has its source code in code/",
}


@pytest.mark.parametrize("arguments, message", draw_cases("refused reruns", [*REFUSED_ARGUMENTS.items()], 4))
def test_a_run_that_cannot_be_repeated_is_refused(tmp_path: Path, arguments: str, message: str) -> None:
    for name in ("mnist_pipeline-20260101-000000-aaaa", "mnist_pipeline-20260101-000000-bbbb"):
        (tmp_path / name).mkdir()
        shutil.copy(ROOT / "configs/mnist_pipeline.yaml", tmp_path / name / "config.yaml")
        write_json(tmp_path / name / "result.json", {"state": "finished"})
    old, bare = sorted(tmp_path.iterdir())
    for name in ("experiments", "common", "slurm", "configs"):
        shutil.copytree(ROOT / name, old / "code" / name)
    completed = in_process_calls.call_verb("rerun", *shlex.split(arguments.format(old=old, bare=bare)), status=2)
    assert message in completed.stderr, completed.stderr
    assert len(list(tmp_path.iterdir())) == 2


def test_an_active_run_is_neither_repeated_nor_resumed(tmp_path: Path) -> None:
    run = SyntheticRun("mnist_pipeline", state="running").write(tmp_path).path
    repeated = in_process_calls.call_verb("rerun", "--", str(run), status=2)
    remedy = f"wait until the run has ended (make status RUN={run} WAIT=600)"
    assert repeated.stderr == f"error: {run.name} is RUNNING; {remedy}\n"
    resumed = in_process_calls.call_verb("exp", f"--resume={run}", status=2)
    remedy = f"to resume the run elsewhere, first run make cancel RUN={run}"
    assert resumed.stderr == f"error: {run.name} is RUNNING; {remedy}\n"
    assert list(tmp_path.iterdir()) == [run]


FINISHED = {"format": 2, "state": "finished", "exit_status": 0, "data": "digits"}
MEASURED: dict[str, dict[str, Any]] = yaml.safe_load(
    """
    timings: {samples_per_second: 1.0, step_seconds: 1.0}
    memory: {rank 0: 1}
    measured: {idle_share: [0.1], timeline: [start: 0.0], export: /runs/a/model.pt2, export_bytes: 1}
    """
)
SCORES = {"test_loss": 0.5, "test_accuracy": 0.9, "test_samples": 100}
OUTCOME: dict[str, Any] = yaml.safe_load(
    """
    {final_loss: 0.25, bytes_sent: 8.0, steps_skipped: 0, nonzero: 80, weights: 100, sparsity: 0.2, masks: ab12,
    bytes_raw: 400, int8_accuracy: 0.9, ideal_bubble: 0.2, last_batch: [3, 2], computed_in: fp32}
    """
)


def test_all_results_that_depend_on_the_training_alone_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = SyntheticRun(number=0, steps=10).write(tmp_path)
    new = SyntheticRun(number=1, steps=10).write(tmp_path)
    shutil.copy(old.list_attempts()[0].metrics_file, new.list_attempts()[0].metrics_file)
    trained = SCORES | OUTCOME | {"data": "digits"}
    old_result = FINISHED | MEASURED | {"scores": SCORES, "outcome": OUTCOME}
    write_json(old.path / "result.json", old_result)
    other_measured = {group: dict.fromkeys(values, "another") for group, values in MEASURED.items()}
    new_result = old_result | other_measured
    write_json(new.path / "result.json", new_result)
    assert rerun.compare_runs(old, new)
    assert f"result      bitwise equal: {', '.join(trained)}\n" in capsys.readouterr().out
    for key, value in trained.items():
        changed: Any = "another"
        distance = ""
        if isinstance(value, int | float):
            changed = value + 0.5
            distance = ", 0.5 apart"
        result: dict[str, Any] = copy.deepcopy(new_result)
        group = next((result[name] for name in ("scores", "outcome") if key in result[name]), result)
        group[key] = changed
        write_json(new.path / "result.json", result)
        assert not rerun.compare_runs(old, new)
        messages = [line for line in capsys.readouterr().out.splitlines() if line.startswith("result")]
        assert messages == [f"result      {key}: was {value}, now {changed}{distance}"]


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_settings_for_training_of_an_older_measurement_do_not_differ(name: str, tmp_path: Path) -> None:
    old = SyntheticRun(name, 1, 4).write(tmp_path)
    text = (old.path / "config.yaml").read_text()
    (old.path / "config.yaml").write_text(f"{text}batch: 64\ndata:\n  name: none\n")
    write_json(old.path / "meta.json", {})
    settings = [f"--config={old.path / 'config.yaml'}", "seed=3"]
    cfg = config.load_config(config.import_schema(name), settings, {})
    differences = rerun.list_differences(old, config.format_yaml(cfg), cfg, prepare.NO_DATA, None)
    differing = [name for name, old_value, new_value in differences if old_value not in (None, new_value)]
    assert differing == ["seed"]


def test_cluster_arguments_override_the_profile_of_the_run(tmp_path: Path) -> None:
    setup = ["module load cuda"]
    profile = Profile(partition="long", gpus=2, gpus_as="gres", requeue=False, memory_gb=1.5, setup=setup)
    recorded = vars(profile) | {"setting_of_another_version": 1}
    write_json(tmp_path / "meta.json", {"job": {"id": "7", "scheduler": "local", "profile": recorded}})
    old = RunFolder(tmp_path)
    assert rerun.choose_cluster_profile(old, "", []) == profile
    longer = rerun.choose_cluster_profile(old, "", ["cluster.time=120"])
    assert longer == dataclasses.replace(profile, time=120)
    assert rerun.choose_cluster_profile(old, "default", ["cluster.time=120"]).partition == ""
    with pytest.raises(UserError, match="did you mean partition"):
        rerun.choose_cluster_profile(old, "", ["cluster.partion=x"])


def test_the_distance_of_a_missing_loss_is_infinite() -> None:
    assert rerun.compute_distance(None, None) == 0
    assert rerun.compute_distance(1.0, None) == float("inf")
    assert rerun.compute_distance(1.0, 1.5) == 0.5
