"""The verbs `evaluate` and `export`: the trained model of a finished run, measured again or written for other programs.

`evaluate` builds the model in one process and prints its test numbers beside the run's own. Exit status: 0 equal, 3
different; 0, too, where the test samples are not those of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.core import config
from common.core.errors import UserError, summarize_error
from common.data import prepare
from common.runs import provenance
from common.runs.folder import MODEL, MODEL_FACTS, Folder, disk_errors, read_json
from common.runs.progress import Screen
from slurm.arguments import split_settings
from slurm.reports import selection

if TYPE_CHECKING:
    from torch import Tensor, nn

    from common.data.loader import Images
    from common.training.evaluate import Predict

DIFFERENT = 3  # exit status
DATA = ("name", "root", "cache", "test_limit", "image_size", "samples", "classes", "unreadable", "download_timeout")
EFFECTIVE = ("eval_batch", *(f"data.{name}" for name in DATA))  # settings that a measurement uses
APART = {"float32": 1e-6, "float64": 1e-12}  # by how much, relative, the loss of the same model may differ
NEAR = {"torch.export": 1e-6, "onnx": 1e-4}  # likewise the outputs of an exported one, of the largest
SUFFIX = {"torch.export": "pt2", "onnx": "onnx"}
SAMPLES = 7  # with which an exported model is compared


def evaluate_model(folder: Folder, words: list[str]) -> int:
    """Measure the model of a run on its test samples, or those that the words name; returns the exit status.

    Raises UserError where the samples do not fit the model, and for settings without effect.
    """
    schema = config.import_schema(folder.experiment)
    own = config.read_config_file(folder.path / "config.yaml")
    own |= {name: now for name, (_, now) in config.read_last_changes(folder.path).items()}
    given = config.parse_command_line(words).values
    settings = config.build_config(schema, [own, given])
    useless = [name for name in given if name not in EFFECTIVE and not name.startswith("log.")]
    if useless:
        raise UserError(f"ARGS: {useless[0]} has no effect on a measurement; {', '.join(EFFECTIVE)} and log.* have")
    source = None if "data.name" in given else folder.path / "code"
    found = prepare.prepare_dataset(settings.data, fallback=False, log=settings.log, code=source)
    import torch

    from common.data import loader
    from common.models import model_file

    facts, model = model_file.load_model(folder)
    test = loader.Images(found, "test", settings.data.test_limit)
    if list(test.shape) != facts["shape"]:
        raise UserError(
            f"the model takes images of shape {facts['shape']}, {found.name} has {list(test.shape)}; name the data it "
            "was trained on, or of that shape"
        )
    there = facts.get("device") or find_device(folder)
    device = torch.device(there if there == "cpu" or torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, facts["dtype"])
    predict = make_predictor(model.to(device), facts, device)
    scores = measure_scores(predict, test, device, dtype, int(facts["shares"]), settings)
    parameters = sum(value.numel() for value in model.parameters())
    print(f"model       {folder.path / MODEL}")
    print(f"            {facts['class']}, {parameters:,} parameters, {facts['dtype']}, after step {facts['step']}")
    print(f"data        {found.name}, {scores['test_samples']} test samples from {found.path}")
    if device.type != there:
        print(f"device      {device}; the run was measured on {there}, which rounds otherwise")
    is_same = has_same_samples(folder, own, settings, found)
    then = facts["scores"] if is_same and scores["test_samples"] == facts["scores"].get("test_samples") else {}
    return print_score_comparison(scores, then, APART[facts["dtype"]] if device.type == there else math.inf)


def measure_scores(predict: Predict, test: Images, device: Any, dtype: Any, shards: int, cfg: Any) -> dict[str, float]:
    """Measure the scores as `shards` ranks do, one after the other, and show the progress."""
    import torch

    from common.training.evaluate import compute_scores, sum_scores

    screen = Screen(cfg.log, silent=False)

    def show(shard: int, done: int, total: int) -> None:
        screen.show_progress("evaluation", (shard * total + done) // shards, total)

    with contextlib.closing(screen):
        show(0, 0, len(test))
        measure = functools.partial(sum_scores, predict, test, device, batch=cfg.eval_batch, dtype=dtype)
        sums = [measure(shard=(n, shards), after_batch=functools.partial(show, n)) for n in range(shards)]
    return compute_scores(torch.stack(sums).sum(0))


def make_predictor(model: nn.Module, facts: dict[str, Any], device: Any) -> Callable[[Tensor | None, int], Tensor]:
    """Make the function from a batch to its logits, in the precision and layout of the training."""
    import torch

    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    precision, pixels_last = facts["precision"], facts["channels_last"]
    if pixels_last:
        model.to(memory_format=torch.channels_last)

    def predict(x: Tensor | None, _: int) -> Tensor:
        assert x is not None
        if pixels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, half.get(precision), enabled=precision in half):
            logits: Tensor = model(x)
        return logits

    return predict


def find_device(folder: Folder) -> str:
    """Find the kind of device of a run whose model.json does not name it."""
    names = [read_json(attempt.attempt / "world.json").get("device") for attempt in folder.attempts()[-1:]]
    return "cpu" if names == ["cpu"] else "cuda"


def has_same_samples(folder: Folder, own: dict[str, str], settings: Any, found: prepare.Prepared) -> bool:
    """Check that the test samples are those that the run was measured with."""
    known = (provenance.read_metadata(folder).get("data") or {}).get("sha256") or {}
    limit = own.get("data.test_limit")
    parts = ("test_images", "test_labels")
    return str(settings.data.test_limit) == limit and all(known.get(part) == found.sha256[part] for part in parts)


def print_score_comparison(scores: dict[str, float], then: dict[str, float], apart: float) -> int:
    """Print the scores, and beside them those of the run where it had the same samples; returns the exit status."""
    count = int(scores["test_samples"])
    right, loss = round(scores["test_accuracy"] * count), scores["test_loss"]
    if not then:
        print(f"correct     {right} of {count} ({right / count:.2%})")
        print(f"test loss   {loss:.10g}")
        print("            not compared: these are other samples than the run was measured with, as far as it tells")
        return 0
    before, own = round(then["test_accuracy"] * count), then["test_loss"]
    far = abs(loss - own) / max(abs(own), 1e-300) if math.isfinite(own) else math.inf
    print(f"correct     {right} of {count} ({right / count:.2%}); the run's own number: {before}")
    print(f"test loss   {loss:.10g}; the run's own: {own:.10g}; relative difference {far:.2g}")
    if math.isinf(apart) or (right == before and far <= apart):
        return 0
    print(f"DIFFERENT: the same model gives the same count, and a loss within {apart:g}", flush=True)
    return DIFFERENT


def export_model(folder: Folder, form: str) -> int:
    """Write the model of a run for other programs, and compare its outputs there; returns the exit status.

    Raises UserError where this model cannot be written so.
    """
    from common.models import model_file

    if form == "safetensors":  # which needs no class
        model_file.read_model(folder)
        print(f"{folder.path / MODEL}\n{folder.path / MODEL_FACTS}")
        return 0
    facts, model = model_file.load_model(folder)
    import torch

    from common.models import exporting

    dtype = getattr(torch, facts["dtype"])
    x = torch.randn(SAMPLES, *facts["shape"], generator=torch.Generator().manual_seed(0), dtype=dtype)
    path = folder.path / f"model.{SUFFIX[form]}"
    draft = path.with_name(f".new.{os.getpid()}.{path.name}")
    try:
        with torch.no_grad():
            expected = model(x)
        try:
            with disk_errors(path):
                answer = exporting.WRITERS[form](model, x, draft)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            raise UserError(
                f"this model cannot be exported so: {summarize_error(error)}; use FORMAT=safetensors"
            ) from None
        far = float((answer - expected).abs().max() / expected.abs().max())
        if not far <= NEAR[form]:
            raise UserError(f"{path.name} would give outputs that differ by {far:.2g} of the largest; nothing is kept")
        draft.replace(path)
    finally:
        for left in folder.path.glob(f"{draft.name}*"):
            left.unlink()
    print(f"{path}\nrun in a process without this project, its outputs differ by {far:.2g} of the largest")
    return 0


def main(given: argparse.Namespace) -> int:
    """Evaluate or export the model of a run; returns the exit status. Raises UserError."""
    folder = selection.find_run(given.run, Path("runs"))
    if given.verb == "evaluate":
        words, for_profile = split_settings(given.args)
        if for_profile:
            raise UserError(f"ARGS: {for_profile[0]} means nothing here; the model is measured on this machine")
        return evaluate_model(folder, words)
    form = given.format or "safetensors"
    if form not in ("safetensors", *SUFFIX):
        raise UserError(f"FORMAT={form!r} is unknown; use safetensors, {' or '.join(SUFFIX)}")
    return export_model(folder, form)
