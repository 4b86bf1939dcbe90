"""The `sample` command: continue a text with the trained model of a run, in one process."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from common.runs.folder import RunFolder
from common.system.errors import UserError
from slurm.arguments import parse_count
from slurm.reports import selection

MAX_TEMPERATURE = 100.0


def parse_temperature(text: str) -> float:
    """Parse a temperature; an empty text means 1. Raises UserError for any other text than a number in the range."""
    try:
        temperature = float(text or "1")
    except ValueError:
        temperature = math.nan
    if not 0 <= temperature <= MAX_TEMPERATURE:
        remedy = "0 selects the most probable byte, 1 (default) samples from the model's probabilities"
        raise UserError(f"TEMPERATURE must be a number from 0 to {MAX_TEMPERATURE:g} (got {text!r}); {remedy}")
    return temperature


def sample_from_run(folder: RunFolder, text: str, temperature: float, top_k: int, seed: int) -> str:
    """Return a text and its continuation by the trained model of a run.

    Raises UserError if the run has no model, or if the model was not trained on text.
    """
    from common.models import model_file, sampling

    facts, model = model_file.load_model(folder)
    if facts["data"] != "text":
        problem = f"{folder.path.name} was trained on data.name={facts['data']}, so its model cannot continue a text"
        raise UserError(f"{problem}; use a run with data.name=text")
    context = facts["shape"][0]
    return sampling.sample_text(model, context, text, temperature=temperature, top_k=top_k, seed=seed)


def main(args: argparse.Namespace) -> int:
    """Print a sampled text, and return the exit status. Raises UserError for invalid arguments."""
    folder = selection.find_run(args.run, Path("runs"))
    temperature = parse_temperature(args.temperature)
    top_k = parse_count("TOP_K", args.top_k) if args.top_k else 0
    seed = 0 if args.seed in ("", "0") else parse_count("SEED", args.seed)
    print(sample_from_run(folder, args.text or "", temperature, top_k, seed))
    return 0
