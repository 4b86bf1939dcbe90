"""The `sample` command: continue a text with the model of a run, in one process."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from common.config import config
from common.runs.folder import RunFolder
from common.system.errors import UserError
from slurm.arguments import parse_count
from slurm.reports import selection

if TYPE_CHECKING:
    from torch import nn

MAX_TEMPERATURE = 100.0


def parse_temperature(text: str) -> float:
    """Parse a temperature; an empty text means 1. Raises UserError for any other text than a number in the range."""
    try:
        temperature = float(text or "1")
    except ValueError:
        temperature = math.nan
    if not 0 <= temperature <= MAX_TEMPERATURE:
        remedy = "0 selects the most probable token, 1 (default) samples from the model's probabilities"
        raise UserError(f"TEMPERATURE must be a number from 0 to {MAX_TEMPERATURE:g} (got {text!r}); {remedy}")
    return temperature


def sample_from_run(folder: RunFolder, text: str, temperature: float, top_k: int, seed: int) -> str:
    """Return a text and its continuation by the model of a run.

    Raises UserError if the run has neither a model nor a checkpoint, or if it was not trained on text.
    """
    settings = config.read_settings(folder.path)
    data_name = settings.get("data.name")
    if data_name != "text":
        training = f"was trained on data.name={data_name}" if data_name else "does not train a model"
        problem = f"{folder.path.name} {training}, so it cannot continue a text"
        raise UserError(f"{problem}; use a run with data.name=text")
    from common.data import text_tokens
    from common.models import sampling

    has_file = settings.get("data.tokenizer", "none") != "none"
    tokenizer = text_tokens.open_tokenizer_of_run(folder.path / "code", has_file=has_file)
    model = load_newest_model(folder)
    context = int(settings["data.context"])
    return sampling.sample_text(model, context, tokenizer, text, temperature=temperature, top_k=top_k, seed=seed)


def load_newest_model(folder: RunFolder) -> nn.Module:
    """Load the trained model of a run or, if the run has not finished, the model of its newest valid checkpoint.

    Raises UserError if there is neither.
    """
    from common.models import model_file, weights

    if folder.result.get("state") != "finished":  # an extended run still has the model of its earlier end
        checkpoint = weights.load_model_of_newest_checkpoint(folder)
        if checkpoint is not None:
            step, model = checkpoint
            print(f"{folder.path.name} has not finished; sampling from the checkpoint of step {step}", file=sys.stderr)
            return model
    _, model = model_file.load_model(folder)  # explains why there is no model
    return model


def main(args: argparse.Namespace) -> int:
    """Print a sampled text, and return the exit status. Raises UserError for invalid arguments."""
    folder = selection.find_run_of_experiment(args.run, Path("runs"))
    temperature = parse_temperature(args.temperature)
    top_k = parse_count("TOP_K", args.top_k) if args.top_k else 0
    seed = parse_count("SEED", args.seed, minimum=0) if args.seed else 0
    print(sample_from_run(folder, args.text or "", temperature, top_k, seed))
    return 0
