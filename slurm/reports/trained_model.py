"""The `evaluate` and `export` commands: evaluate the trained model of a run, or export the model for other programs.

`evaluate` builds the model in one process, and prints the test scores of the model and the scores recorded by the run.
The exit status is 3 if the scores of the model differ from the recorded scores. Otherwise, the exit status is 0. The
scores are not compared if the evaluation uses other test samples or another type of device than the run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config import changed_settings, config, custom_code
from common.config.command_line import parse_command_line
from common.data import prepare
from common.runs import provenance
from common.runs.folder import MODEL_FACTS_FILE, MODEL_FILE, RunFolder, convert_disk_errors, read_json
from common.runs.progress import ProgressDisplay
from common.system.errors import UserError, summarize_error
from configs.shared import TrainingExperiment
from slurm.arguments import split_experiment_and_cluster_settings
from slurm.reports import selection

if TYPE_CHECKING:
    from torch import Tensor, nn

    from common.data.prepare import PreparedDataset
    from common.data.samples import Images
    from common.training.evaluate import Predict

EXIT_DIFFERENT = 3  # exit status of `evaluate` if the scores differ from the scores recorded by the run
DATA_KEYS = (
    "name",
    "root",
    "cache",
    "test_limit",
    "image_size",
    "context",
    "samples",
    "classes",
    "unreadable",
    "download_timeout",
)
EFFECTIVE_KEYS = ("eval_batch", *(f"data.{name}" for name in DATA_KEYS))  # settings that affect an evaluation
LOSS_TOLERANCE = {"float32": 1e-6, "float64": 1e-12}  # maximum relative difference of the losses
AUTOCAST_LOSS_TOLERANCE = {"bf16": 1e-3, "fp16": 1e-4}
"""The same with autocast. If ranks added up partial products, they rounded these to the lower precision."""
OUTPUT_TOLERANCE = {"torch.export": 1e-6, "onnx": 1e-4}  # maximum difference, relative to the largest output
FILE_SUFFIX = {"torch.export": "pt2", "onnx": "onnx"}
EXPORT_SAMPLES = 7  # number of random inputs used to check an exported model


def evaluate_model(folder: RunFolder, arguments: list[str]) -> int:
    """Evaluate the trained model of a run, and return the exit status.

    By default, the evaluation uses the test samples of the run. The settings in `arguments` can select other samples.
    Raises UserError if the shape of the samples does not fit the model or a setting has no effect.
    """
    run_settings = config.read_settings(folder.path)
    for key, (_, new_value) in changed_settings.read_last_changes(folder.path).items():
        run_settings[key] = new_value
    changes = parse_command_line(arguments).values
    schema = config.import_schema(folder.experiment)
    if not issubclass(schema, TrainingExperiment):
        raise UserError(f"{folder.path.name}: {folder.experiment} does not train a model; use another run")
    cfg = custom_code.use_file_copies(config.build_config(schema, [run_settings, changes]), folder.path / "code")
    for key in changes:
        if key not in EFFECTIVE_KEYS and not key.startswith("log."):
            raise UserError(f"ARGS: {key} has no effect on an evaluation; use {', '.join(EFFECTIVE_KEYS)} or log.*")

    # Unless another data set was selected, use the run's copy of a custom data set.
    source = None if "data.name" in changes else folder.path / "code"
    data = prepare.prepare_dataset(cfg.data, fallback=False, log=cfg.log, code=source)
    import torch

    from common.data import samples
    from common.models import model_file

    facts, model = model_file.load_model(folder)
    test_set = samples.open_samples(data, "test", cfg.data.test_limit)
    if list(test_set.shape) != facts["shape"]:
        raise UserError(
            f"the model takes inputs of shape {facts['shape']}, but {data.name} has shape {list(test_set.shape)}; "
            "use the data that the model was trained on, or other data of this shape"
        )
    check_classes(data, test_set, facts.get("class_names"))

    run_device = facts.get("device") or find_run_device(folder)
    device = torch.device(run_device if torch.cuda.is_available() else "cpu")
    predict = make_predictor(model.to(device), facts, device)
    scores = compute_test_scores(predict, test_set, device, getattr(torch, facts["dtype"]), int(facts["shares"]), cfg)

    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"model       {folder.path / MODEL_FILE}")
    print(f"            {facts['class']}, {parameters:,} parameters, {facts['dtype']}, after step {facts['step']}")
    print(f"data        {data.name}, {scores['test_samples']} test samples from {data.path}")
    tolerance = AUTOCAST_LOSS_TOLERANCE.get(facts["precision"], LOSS_TOLERANCE[facts["dtype"]])
    if device.type != run_device:
        print(f"device      {device}; the run was evaluated on {run_device}, which rounds differently")
        tolerance = math.inf

    # Compare the scores only if the run was evaluated on the same samples.
    expected: dict[str, float] = {}
    if has_same_samples(folder, run_settings.get("data.test_limit"), cfg, data):
        expected = facts["scores"]
    if scores["test_samples"] != expected.get("test_samples"):
        expected = {}
    return print_score_comparison(scores, expected, tolerance)


def check_classes(data: PreparedDataset, test_set: Images, class_names: list[str] | None) -> None:
    """Raise UserError if the classes of a data set are not those of a model. Without class names, nothing is checked.

    A model for classes has an output for each name in `class_names`. Labels are positions in the list of names.
    """
    from common.data import preprocessing

    if class_names is None:
        return
    remedy = "use data with the classes of the model"
    if not test_set.has_labels:
        raise UserError(f"the model predicts classes, but the targets of {data.name} are not class labels; {remedy}")
    names = preprocessing.list_class_names(data, test_set.outputs)
    if names != class_names[: len(names)]:
        model = ", ".join(class_names)
        raise UserError(f"the model has the classes {model}, but {data.name} has {', '.join(names)}; {remedy}")


def compute_test_scores(
    predict: Predict, test_set: Images, device: Any, dtype: Any, shards: int, cfg: Any
) -> dict[str, float]:
    """Compute the test scores, and show the progress.

    The scores are summed over `shards` shards, as on the ranks of the run, so that rounding errors are the same.
    """
    import torch

    from common.training.evaluate import choose_test_loss, compute_scores, sum_scores

    screen = ProgressDisplay(cfg.log, silent=False)

    def show_progress(shard: int, done: int, total: int) -> None:
        """Show the progress over all shards, given the progress within one shard."""
        screen.show_progress("evaluation", (shard * total + done) // shards, total)

    sums = []
    with contextlib.closing(screen):
        show_progress(0, 0, len(test_set))
        loss = choose_test_loss(cfg, test_set)
        measure = functools.partial(sum_scores, predict, test_set, device, loss=loss, batch=cfg.eval_batch, dtype=dtype)
        for shard in range(shards):
            sums.append(measure(shard=(shard, shards), after_batch=functools.partial(show_progress, shard)))
    return compute_scores(torch.stack(sums).sum(0))


def make_predictor(model: nn.Module, facts: dict[str, Any], device: Any) -> Callable[[Tensor | None, int], Tensor]:
    """Return a function that computes the logits of a batch.

    The function uses the precision and memory format of the training run.
    """
    import torch

    autocast_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(facts["precision"])
    channels_last = facts["channels_last"]
    if channels_last:
        model.to(memory_format=torch.channels_last)

    def predict(x: Tensor | None, _: int) -> Tensor:
        """Return the logits of a batch of images."""
        assert x is not None
        if channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None):
            logits: Tensor = model(x)
        return logits

    return predict


def find_run_device(folder: RunFolder) -> str:
    """Return the device type of a run, such as cpu, as recorded in world.json.

    Models of older versions do not record the device type in model.json.
    """
    names = [read_json(attempt.attempt_folder / "world.json").get("device") for attempt in folder.list_attempts()[-1:]]
    return "cpu" if names == ["cpu"] else "cuda"


def has_same_samples(folder: RunFolder, test_limit: str | None, cfg: Any, data: prepare.PreparedDataset) -> bool:
    """Return whether this evaluation uses the same test samples as the run.

    The value of data.test_limit and the checksums of the test files are compared.
    """
    checksums = (provenance.read_metadata(folder).get("data") or {}).get("sha256") or {}
    if str(cfg.data.test_limit) != test_limit:
        return False
    parts = [part for part in data.sha256 if not part.startswith("train")]
    return all(checksums.get(part) == data.sha256[part] for part in parts)


def print_score_comparison(scores: dict[str, float], expected: dict[str, float], tolerance: float) -> int:
    """Print the scores, compare them with the run's scores, and return the exit status.

    `expected` contains the scores recorded by the run, or is empty if the run used different samples.
    """
    count = int(scores["test_samples"])
    loss = scores["test_loss"]
    correct = None
    if "test_accuracy" in scores:
        correct = round(scores["test_accuracy"] * count)
        recorded = f"; recorded by the run: {round(expected['test_accuracy'] * count)}" if expected else ""
        print(f"correct     {correct} of {count} ({correct / count:.2%}){recorded}")
    if not expected:
        print(f"test loss   {loss:.10g}")
        print("            not compared: the run was evaluated on other samples, or did not record its samples")
        return 0

    expected_correct = None if correct is None else round(expected["test_accuracy"] * count)
    expected_loss = expected["test_loss"]
    difference = math.inf
    if math.isfinite(expected_loss):
        difference = abs(loss - expected_loss) / max(abs(expected_loss), 1e-300)
    print(f"test loss   {loss:.10g}; recorded by the run: {expected_loss:.10g}; relative difference: {difference:.2g}")
    if math.isinf(tolerance) or (correct == expected_correct and difference <= tolerance):
        return 0
    allowed = f"a relative loss difference of at most {tolerance:g}"
    print(f"DIFFERENT: expected the same number of correct samples and {allowed}", flush=True)
    return EXIT_DIFFERENT


def export_model(folder: RunFolder, form: str) -> int:
    """Export the trained model of a run for other programs, and return the exit status.

    `form` is safetensors or a key of FILE_SUFFIX. Raises UserError if the model cannot be exported.
    """
    from common.models import model_file

    if form == "safetensors":  # the file exists already, and reading it does not require the model class
        facts, _ = model_file.read_model(folder)
        warn_of_earlier_end(folder, facts["step"])
        print(f"{folder.path / MODEL_FILE}\n{folder.path / MODEL_FACTS_FILE}")
        return 0

    facts, model = model_file.load_model(folder)
    warn_of_earlier_end(folder, facts["step"])
    path = folder.path / f"model.{FILE_SUFFIX[form]}"
    # Write a draft first, so that an invalid export never replaces an earlier one.
    draft = path.with_name(f".new.{os.getpid()}.{path.name}")
    try:
        with convert_disk_errors(path):
            draft.touch()  # torch.export reports a read-only disk as an error of the model
        difference = write_checked_export(model, facts, form, draft, path)
        draft.replace(path)
    finally:
        for leftover in folder.path.glob(f"{draft.name}*"):
            leftover.unlink()
    check = "checked: the outputs of the exported model differ from those of the run's model"
    print(f"{path}\n{check} by at most {difference:.2g} of the largest output")
    return 0


def warn_of_earlier_end(folder: RunFolder, step: int) -> None:
    """Print a note if the run was extended and has not finished again, so that its model is the one of `step`."""
    if folder.result.get("state") != "finished":
        end = f"this is the model of its earlier end, after step {step}"
        print(f"note: {folder.path.name} was extended and has not finished; {end}", file=sys.stderr)


def write_checked_export(model: nn.Module, facts: dict[str, Any], form: str, draft: Path, path: Path) -> float:
    """Write an exported model to the file `draft`, and check its outputs for random inputs, or zeros.

    Channels whose weights are zero are not exported.
    Returns the largest difference between the outputs of the exported and the original model, relative to the largest
    output. Raises UserError if the model cannot be exported or the difference is too large. Error messages contain
    `path`, the path to which the caller renames `draft`.
    """
    from common.models import exporting, zero_channels

    random_inputs = exporting.draw_inputs(facts, EXPORT_SAMPLES)
    x, expected = exporting.compute_outputs(model, random_inputs)
    if x is not random_inputs:
        print("note: the model refuses random inputs, so the exported model is checked with zeros", file=sys.stderr)
    smaller = zero_channels.remove_zero_channels(model, x)
    removed = zero_channels.count_parameters(model) - zero_channels.count_parameters(smaller)
    if removed:
        print(f"removed {removed:,} parameters of channels whose weights are zero")
    try:
        with convert_disk_errors(path):
            outputs = exporting.WRITERS[form](smaller, x, draft)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 (torch.export raises many types of errors for custom networks)
        raise UserError(
            f"this model cannot be exported as {form}: {summarize_error(error)}; use FORMAT=safetensors"
        ) from None

    difference = float((outputs - expected).abs().max() / expected.abs().max())
    if not difference <= OUTPUT_TOLERANCE[form]:  # also true for NaN
        raise UserError(
            f"{path.name} was not written: the outputs of the exported model differ from those of the run's model "
            f"by {difference:.2g} of the largest output"
        )
    return difference


def main(args: argparse.Namespace) -> int:
    """Evaluate or export the trained model of a run, and return the exit status.

    Raises UserError for invalid arguments, or if the run has no model.
    """
    folder = selection.find_run_of_experiment(args.run, Path("runs"))
    if args.verb == "evaluate":
        arguments, profile_arguments = split_experiment_and_cluster_settings(args.args)
        if profile_arguments:
            raise UserError(f"ARGS: {profile_arguments[0]} has no effect: the model is evaluated on this machine")
        return evaluate_model(folder, arguments)
    form = args.format or "safetensors"
    if form not in ("safetensors", *FILE_SUFFIX):
        raise UserError(f"FORMAT={form!r} is unknown; use safetensors, {' or '.join(FILE_SUFFIX)}")
    return export_model(folder, form)
