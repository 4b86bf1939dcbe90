"""Report on a model of text: bits per byte, the losses of n-gram models, and a sample."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from common.data.text_samples import read_text_facts
from common.data.text_tokens import open_tokenizer_of_run
from common.models import model_file, sampling
from common.runs.result import ReportData
from common.system.errors import UserError
from common.training.run_context import RunContext

SAMPLE_TOKENS = 160
"""Number of tokens of the sample in the final table."""


def add_bits_per_byte(scores: dict[str, float], run: RunContext) -> dict[str, float]:
    """Add the cross-entropy in bits per byte of text to scores, whose `test_loss` is in nats per token."""
    bytes_per_token = read_text_facts(run.prepared)["test_bytes_per_token"]
    return scores | {"bits_per_byte": scores["test_loss"] / math.log(2) / bytes_per_token}


class TextReport:
    """Report of a run that has trained a model of text. It samples from the file of the trained model."""

    def __init__(self, run: RunContext, prompt: str) -> None:
        self.run = run
        self.prompt = prompt
        self.facts = read_text_facts(run.prepared)

    @functools.cached_property
    def sample(self) -> str:
        """The prompt and its continuation by the trained model, or the reason why there is no sample."""
        tokenizer = open_tokenizer_of_run(self.run.folder.path / "code", has_file="tokenizer_sha256" in self.facts)
        _, model = model_file.load_model(self.run.folder)
        context = self.run.sample_shape[0]
        seed = self.run.cfg.seed
        try:
            return sampling.sample_text(model, context, tokenizer, self.prompt, tokens=SAMPLE_TOKENS, seed=seed)
        except UserError as error:
            return f"none: {error}"

    def rows(self) -> Mapping[str, str]:
        bigram = self.facts["bigram_loss"]
        unigram = self.facts["unigram_loss"]
        relation = "below" if self.run.scores["test_loss"] < bigram else "not below"
        comparison = f"the test loss is {relation} that of a bigram model, {bigram:.4f} (unigram {unigram:.4f})"
        if self.run.scores["test_samples"] * self.run.sample_shape[0] < self.facts["test_tokens"]:
            comparison = "not compared, because only a part of the held-out text was evaluated"
        return {
            "bits per byte": f"{self.run.scores['bits_per_byte']:.4f}",
            "bigram model": comparison,
            "sample": self.sample,
        }

    def result(self) -> ReportData:
        outcome: dict[str, Any] = {f"text_{name}": self.facts[name] for name in ("bytes", "sha256")}
        for name in ("tokenizer_sha256", "unigram_loss", "bigram_loss"):
            if name in self.facts:
                outcome[name] = self.facts[name]
        return ReportData(outcome=outcome | {"sample": self.sample})
