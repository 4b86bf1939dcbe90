"""gpt_parallel learns a text, evaluates within an epoch, samples, and refuses unsuitable settings and texts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from common.config import config
from configs.gpt_parallel import Config
from tests.harness.commands import in_process_calls
from tests.harness.commands.exit_status import Completed
from tests.harness.commands.processes import FinishedRun, run_experiment
from tests.harness.commands.refusals import expect_refusal
from tests.harness.environment.shared_results import GetRun
from tests.harness.experiments.registry import ENTRY_BY_NAME, STAGED_ENTRY
from tests.harness.runs.resuming import resume_run

NAME = "gpt_parallel"
SENTENCES = ("the cat sat on the mat. ", "a dog ran to the park. ", "the sun is a star. ", "we read a short text. ")
SMALL = (
    *("data.context=32", "width=64", "layers=1", "tied=false", "optim.lr=0.01", "optim.warmup=5", "epochs=4"),
    *("log.progress=none", "launch.threads=1"),
)

CUSTOM_NETWORK = """
from torch import nn


class Recurrent(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.embedding = nn.Embedding(outputs, 24)
        self.recurrence = nn.GRU(24, 24, batch_first=True)
        self.head = nn.Linear(24, outputs)

    def forward(self, tokens):
        return self.head(self.recurrence(self.embedding(tokens))[0])
"""


def write_sentences(file: Path, count: int = 2000) -> Path:
    """Write sentences in an order that a bigram model cannot predict."""
    file.write_text("".join(SENTENCES[number * number % 7 % len(SENTENCES)] for number in range(count)))
    return file


def train(tmp_path: Path, *settings: str, status: int = 0) -> FinishedRun:
    """Train on tmp_path/text.txt."""
    data = (f"data.root={tmp_path / 'text.txt'}", f"data.cache={tmp_path / 'cache'}")
    return run_experiment(NAME, *data, *SMALL, *settings, runs=tmp_path / "runs", status=status)


def load_settings(*settings: str) -> Config:
    return config.load_config(Config, settings, environ={})


def sample(run: Path, *options: str, status: int = 0) -> Completed:
    return in_process_calls.call_verb("sample", *options, "--", str(run), status=status)


# ---- training


def test_it_learns_more_than_pairs_of_bytes_and_continues_the_text(tmp_path: Path) -> None:
    write_sentences(tmp_path / "text.txt")
    completed = train(tmp_path, "steps=60", "evaluate_every=25", "prompt=the cat")
    result = completed.result
    assert result["test_loss"] < result["bigram_loss"] < result["unigram_loss"]
    assert "the test loss is below that of a bigram model" in completed.stdout
    assert result["bits_per_byte"] == pytest.approx(result["test_loss"] / math.log(2), rel=1e-12)
    assert result["sample"].startswith("the cat")
    assert result["text_bytes"] == (tmp_path / "text.txt").stat().st_size
    evaluations = [row for row in completed.folder.read_metrics() if "test_loss" in row]
    assert [row["global_step"] for row in evaluations] == [25, 50, 55, 60], (
        "every 25 steps, after the epoch, and at the end"
    )
    assert all(row["bits_per_byte"] > 0 for row in evaluations)
    losses = [row["test_loss"] for row in evaluations]
    assert losses == sorted(losses, reverse=True)

    run = completed.folder.path
    greedy = sample(run, "--text=a dog", "--temperature=0").stdout
    assert greedy.startswith("a dog ran to the ")
    first = sample(run, "--text=a dog", "--seed=3").stdout
    assert sample(run, "--text=a dog", "--seed=3").stdout == first
    assert sample(run, "--text=a dog", "--seed=3", "--top-k=1").stdout == greedy


def test_a_run_is_not_resumed_with_another_text(tmp_path: Path) -> None:
    file = write_sentences(tmp_path / "text.txt")
    completed = train(tmp_path, "steps=4", "batch=8")
    file.write_text(file.read_text().replace("cat", "cow"))
    resumed = resume_run(ENTRY_BY_NAME[NAME], completed.folder, "steps=8", status=2)
    assert "was trained on different data" in resumed.stderr
    assert "restore the original data" in resumed.stderr


def test_a_custom_network_is_trained_and_sampled(tmp_path: Path) -> None:
    write_sentences(tmp_path / "text.txt")
    file = tmp_path / "recurrent.py"
    file.write_text(CUSTOM_NETWORK)
    completed = train(tmp_path, f"model={file}:Recurrent", "steps=20", "evaluate_every=0")
    assert completed.losses[-1] < completed.losses[0]
    assert len(sample(completed.folder.path, "--text=a").stdout) > 1


# ---- unsuitable settings

INVALID_SETTINGS = {
    "width=100 heads=8": "width=100 cannot be divided into heads=8 ... use width=96 or 112",
    "heads=4 key_value_heads=3": "heads=4 cannot be divided evenly among key_value_heads=3",
    "tensor=3 replicas=1": "heads=4 cannot be divided evenly by tensor=3",
    "tensor=3 replicas=1 heads=6 width=96": "tensor=3 does not divide the vocabulary of 256 bytes evenly; use tensor=2",
    "tensor=2 key_value_heads=1": "key_value_heads=1 cannot be divided evenly by tensor=2",
    "tensor=2 hidden=33": "hidden=33 cannot be divided evenly by tensor=2; use hidden=32 or 34",
    "tensor=2 sequence=true data.context=33": "data.context=33 cannot be divided evenly by tensor=2",
    "context=2 data.context=34": "data.context=34 cannot be divided evenly by 2 x context=2; use data.context=32 or 36",
    "context=2 tensor=4 sequence=true data.context=40": "by 2 x context=2 x tensor=4; use data.context=32 or 48",
    "context=2 launch.device=cuda": "context runs on CPUs only; set launch.device=cpu",
    "sequence=true": "sequence=true divides the tokens ... set tensor=2",
    "reshard=false": "reshard=false applies to fsdp only",
    "batch=25": "batch=25 cannot be divided evenly by fsdp=1 x replicas=2; use batch=24 or 26",
    "batch=24 accumulate=5": "batch=24 cannot be divided evenly into accumulate=5 microbatches ... use batch=20 or 30",
    "data.name=mnist": "model=gpt needs text ... use data.name=text",
    "loss=mse": "loss=mse is not available for text",
    "context=2 model=net.py:Net": "tensor, context and fsdp divide model=gpt only",
    "dropout=0.2 model=net.py:Net": "dropout=0.2 applies to model=gpt only",
    "data.context=1": "data.context=1 ... int from 2",
    "data.augment=crop": "data.augment=crop needs images, but data.name=text has none",
}


@pytest.mark.parametrize("settings, message", INVALID_SETTINGS.items())
def test_invalid_settings_are_refused_with_the_remedy(settings: str, message: str) -> None:
    with expect_refusal(message):
        load_settings(*settings.split())


def test_text_is_refused_by_networks_for_images() -> None:
    schema = config.import_schema(STAGED_ENTRY.name)
    with expect_refusal("data.name=text contains text, which model=mlp does not accept ... use another data set"):
        config.load_config(schema, ["data.name=text"], environ={})


def test_an_unsuitable_text_is_refused_without_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("too short")
    completed = train(tmp_path, status=2)
    assert "the text has 9 tokens, but two samples of data.context=32 tokens need 66" in completed.stderr
    assert not (tmp_path / "runs").exists()


# ---- unsuitable samples


def test_invalid_arguments_of_sample_are_refused(finished: GetRun) -> None:
    text_run = finished(ENTRY_BY_NAME[NAME]).folder.path
    image_run = finished(STAGED_ENTRY).folder.path
    for run, option, message in (
        (text_run, "--temperature=-1", "TEMPERATURE must be a number from 0 to 100 (got '-1')"),
        (text_run, "--temperature=hot", "TEMPERATURE must be a number from 0 to 100 (got 'hot')"),
        (text_run, "--top-k=0", "TOP_K must be an integer from 1"),
        (text_run, "--seed=x", "SEED must be an integer from 1"),
        (image_run, "--text=a", "was trained on data.name=digits, so its model cannot continue a text"),
    ):
        completed = sample(run, option, status=2)
        assert message in completed.stderr
        assert completed.stderr.count("\n") == 1
