"""gpt_parallel learns a text, evaluates within an epoch, samples, and refuses unsuitable settings and texts."""

from __future__ import annotations

import hashlib
import math
import shutil
from pathlib import Path

import pytest

from common.checkpoint import storage
from common.config import config
from common.config.config import StartedRanks
from common.data.prepare import hash_file
from common.data.text_tokens import FileTokenizer
from common.runs.folder import MODEL_FACTS_FILE, MODEL_FILE, RunFolder, read_json
from common.system.errors import UserError
from configs.gpt_parallel import Config
from configs.profile import Profile
from slurm.launch import submit
from tests.harness.commands import in_process_calls
from tests.harness.commands.exit_status import Completed
from tests.harness.commands.processes import FinishedRun, run_experiment
from tests.harness.commands.refusals import expect_refusal
from tests.harness.environment.shared_results import GetRun
from tests.harness.experiments.registry import ENTRY_BY_NAME, STAGED_ENTRY
from tests.harness.runs.resuming import copy_as_interrupted, resume_run
from tests.harness.settings_text import split_settings

NAME = "gpt_parallel"
SENTENCES = ("the cat sat on the mat. ", "a dog ran to the park. ", "the sun is a star. ", "we read a short text. ")
SMALL_SETTINGS = """
    data.context=32 width=64 layers=1 tied=false optim.lr=0.01 optim.warmup=5 epochs=4
    log.progress=none launch.threads=1
"""
SMALL = split_settings(SMALL_SETTINGS)

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


FIXED_POSITIONS = """
import torch
from torch import nn


class FixedPositions(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.embedding = nn.Embedding(outputs, 24)
        self.positions = nn.Parameter(torch.zeros(*shape, 24))
        self.head = nn.Linear(24, outputs)

    def forward(self, tokens):
        return self.head(self.embedding(tokens) + self.positions)
"""


def write_sentences(file: Path, count: int = 2000) -> Path:
    """Write sentences in an order that a bigram model cannot predict."""
    positions = [number * number % 7 % len(SENTENCES) for number in range(count)]
    file.write_text("".join(SENTENCES[position] for position in positions))
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


@pytest.mark.slow
def test_it_learns_more_than_pairs_of_bytes_and_continues_the_text(tmp_path: Path) -> None:
    write_sentences(tmp_path / "text.txt")
    completed = train(tmp_path, "steps=60", "evaluate_every=25", "prompt=the cat")
    result = completed.result
    assert result["test_loss"] < result["bigram_loss"] < result["unigram_loss"]
    assert "the test loss is below that of a bigram model" in completed.stdout
    assert result["bits_per_byte"] == pytest.approx(result["test_loss"] / math.log(2), rel=1e-12)
    assert result["sample"].startswith("the cat")
    assert result["text_bytes"] == (tmp_path / "text.txt").stat().st_size
    assert result["tokens_per_second"] == pytest.approx(result["samples_per_second"] * 32, rel=1e-9)
    evaluations = [row for row in completed.folder.read_metrics() if "test_loss" in row]
    steps = [row["global_step"] for row in evaluations]
    assert steps == [25, 50, 55, 60], "every 25 steps, after the epoch, and at the end"
    for row in evaluations:
        assert row["bits_per_byte"] > 0
    losses = [row["test_loss"] for row in evaluations]
    assert losses == sorted(losses, reverse=True)

    run = completed.folder.path
    greedy = sample(run, "--text=a dog", "--temperature=0").stdout
    assert greedy.startswith("a dog ran to the ")
    assert sample(run, "--text=a dog", "--temperature=0", "--seed=4").stdout == greedy
    first = sample(run, "--text=a dog", "--temperature=1", "--seed=3").stdout
    assert first != greedy
    assert sample(run, "--text=a dog", "--seed=3").stdout == first, "the default temperature is 1"
    assert sample(run, "--text=a dog", "--seed=4").stdout != first
    assert sample(run, "--text=a dog", "--seed=3", "--temperature=100").stdout != first
    assert sample(run, "--text=a dog", "--seed=3", "--top-k=1").stdout == greedy


def test_a_run_is_not_resumed_with_another_text(tmp_path: Path) -> None:
    file = write_sentences(tmp_path / "text.txt")
    completed = train(tmp_path, "steps=4", "batch=8")
    file.write_text(file.read_text().replace("cat", "cow"))
    resumed = resume_run(ENTRY_BY_NAME[NAME], completed.folder, "steps=8", status=2)
    assert "was trained on different data" in resumed.stderr
    assert "restore the original data" in resumed.stderr


@pytest.mark.slow
def test_a_custom_network_is_trained_and_sampled(tmp_path: Path) -> None:
    write_sentences(tmp_path / "text.txt")
    file = tmp_path / "recurrent.py"
    file.write_text(CUSTOM_NETWORK)
    completed = train(tmp_path, f"model={file}:Recurrent", "steps=20", "evaluate_every=0", "zero1=true")
    assert "replicas=2 fsdp=1 context=1 tensor=1 zero1=true\n" in completed.stdout
    assert completed.losses[-1] < completed.losses[0]
    options = ("--text=a", "--temperature=0")
    sampled = sample(completed.folder.path, *options).stdout
    assert len(sampled) > 1
    stopped = remove_model(copy_as_interrupted(completed.folder, 20, tmp_path / "stopped"))
    assert sample(stopped.path, *options).stdout == sampled


def test_a_network_that_accepts_only_full_texts_is_trained_without_a_sample(tmp_path: Path) -> None:
    write_sentences(tmp_path / "text.txt")
    file = tmp_path / "fixed.py"
    file.write_text(FIXED_POSITIONS)
    completed = train(tmp_path, f"model={file}:FixedPositions", "steps=2", "evaluate_every=0", "replicas=1")
    reason = "none: the network does not accept a text of 4 tokens (The size of tensor a (4) must match"
    assert completed.result["sample"].startswith(reason)
    assert "sampling needs a network that accepts any length up to 32 tokens" in completed.result["sample"]
    refused = sample(completed.folder.path, "--text=abc", status=2)
    assert "error: the network does not accept a text of 3 tokens" in refused.stderr
    assert refused.stderr.count("\n") == 1


def remove_model(folder: RunFolder) -> RunFolder:
    """Remove the trained model, which a stopped run does not have."""
    for name in (MODEL_FILE, MODEL_FACTS_FILE):
        (folder.path / name).unlink()
    return folder


def test_a_stopped_run_is_sampled_from_its_newest_checkpoint(finished: GetRun, tmp_path: Path) -> None:
    completed = finished(ENTRY_BY_NAME[NAME])
    options = ("--text=def ", "--temperature=0")
    last_step = read_json(completed.folder.path / MODEL_FACTS_FILE)["step"]
    extended = copy_as_interrupted(completed.folder, last_step, tmp_path)
    assert "sampling from the checkpoint of step" in sample(extended.path, *options).stderr
    stopped = remove_model(extended)
    sampled = sample(stopped.path, *options)
    assert sampled.stdout == sample(completed.folder.path, *options).stdout
    assert f"has not finished; sampling from the checkpoint of step {last_step}\n" in sampled.stderr

    shutil.rmtree(storage.get_checkpoints_dir(stopped.list_attempts()[-1]))
    refused = sample(stopped.path, *options, status=2)
    assert f"{stopped.path} has no model.safetensors yet: the run has not finished" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_a_pipeline_of_one_microbatch_prints_a_notice(tmp_path: Path) -> None:
    write_sentences(tmp_path / "text.txt")
    completed = train(tmp_path, "layers=2", "stages=2", "steps=1", "evaluate_every=0")
    notice = "all stages but one are idle at any time, because a step has one microbatch; use accumulate=4 or more\n"
    assert completed.stdout.count(notice) == 1


# ---- tokenizers


def write_tokenizer(file: Path, vocabulary: int = 280) -> Path:
    """Write a tokenizer of pairs of bytes (BPE) that was trained on the sentences."""
    tokenizers = pytest.importorskip("tokenizers", reason="an optional package; pip install tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.save(str(file))
    return file


@pytest.mark.slow
def test_a_tokenizer_is_kept_with_the_run(tmp_path: Path) -> None:
    text = write_sentences(tmp_path / "text.txt").read_bytes()
    file = write_tokenizer(tmp_path / "tokenizer.json")
    checksum = hash_file(file)
    settings = ("steps=6", "batch=8", "evaluate_every=0", "prompt=the cat", "tensor=2")
    completed = train(tmp_path, f"data.tokenizer={file}", *settings)
    result = completed.result
    assert result["tokenizer_sha256"] == checksum
    assert result["text_sha256"] == hashlib.sha256(text).hexdigest()
    assert result["sample"].startswith("the cat")
    assert completed.folder.path.joinpath("code/own/tokenizer.json").read_bytes() == file.read_bytes()

    held_out = text[-round(0.05 * len(text)) :]
    tokens = len(FileTokenizer(file).encode(held_out))
    assert tokens < len(held_out) / 2
    bits = result["test_loss"] * tokens / len(held_out) / math.log(2)
    assert result["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    assert result["bigram_loss"] < result["unigram_loss"] < math.log(280)

    other = write_tokenizer(tmp_path / "other.json", 270)
    entry = ENTRY_BY_NAME[NAME]
    resumed = resume_run(entry, completed.folder, "steps=8", f"data.tokenizer={other}", status=2)
    assert "data.tokenizer cannot change when a run is resumed" in resumed.stderr
    file.write_bytes(other.read_bytes())
    resume_run(entry, completed.folder, "steps=8")
    file.unlink()
    assert completed.folder.result["outcome"]["tokenizer_sha256"] == checksum
    assert sample(completed.folder.path, "--text=a dog").stdout.startswith("a dog")
    completed.folder.path.joinpath("code/own/tokenizer.json").unlink()
    refused = sample(completed.folder.path, "--text=a dog", status=2)
    assert "code/own/tokenizer.json is missing; restore this file" in refused.stderr


def test_a_vocabulary_that_the_ranks_cannot_divide_is_refused(tmp_path: Path) -> None:
    write_sentences(tmp_path / "text.txt")
    file = write_tokenizer(tmp_path / "tokenizer.json", 271)
    completed = train(tmp_path, f"data.tokenizer={file}", "tensor=2", status=2)
    problem = "tensor=2 does not divide the vocabulary of 271 tokens evenly; use tensor=1, or another tokenizer"
    assert completed.stderr == f"error: {problem}\n"
    assert not (tmp_path / "runs").exists()


# ---- unsuitable settings

INVALID_SETTINGS = {
    "width=100 heads=8": "width=100 cannot be divided into heads=8 ... use width=96 or 112",
    "heads=4 key_value_heads=3": "heads=4 cannot be divided evenly among key_value_heads=3",
    "tensor=3": "heads=4 cannot be divided evenly by tensor=3",
    "tensor=3 heads=6 width=96 hidden=258": "tensor=3 does not divide the vocabulary of 256 tokens ... use tensor=2",
    "tensor=2 key_value_heads=1": "key_value_heads=1 cannot be divided evenly by tensor=2",
    "tensor=2 hidden=33": "hidden=33 cannot be divided evenly by tensor=2; use hidden=32 or 34",
    "tensor=3 heads=6 width=96": "hidden=256 cannot be divided evenly by tensor=3; use hidden=255 or 258",
    "tensor=2 sequence=true data.context=33": "data.context=33 cannot be divided evenly by tensor=2",
    "context=2 data.context=34": "data.context=34 cannot be divided evenly by 2 x context=2; use data.context=32 or 36",
    "context=2 tensor=4 sequence=true data.context=40": "by 2 x context=2 x tensor=4; use data.context=32 or 48",
    "context=2 launch.device=cuda": "context runs on CPUs only; set launch.device=cpu",
    "processes_per_node=3 tensor=2": "launch.nodes=1 x processes_per_node=3 = 3, cannot be divided evenly by fsdp=1 x "
    "context=1 x tensor=2; use processes_per_node=2 or a multiple of 2",
    "processes_per_node=3 replicas=2": "= 3, differs from replicas=2 x fsdp=1 x context=1 x tensor=1; set",
    "sequence=true": "sequence=true divides the tokens ... set tensor=2",
    "reshard=false": "reshard=false applies to fsdp only",
    "zero1=true replicas=1": "no two ranks of this run hold the same parameters; use replicas=2 or more, or omit zero1",
    "zero1=true tensor=2": "zero1=true divides the optimizer state among ranks with the same parameters",
    "zero1=true fsdp=2 context=2": "no two ranks of this run hold the same parameters; use replicas=2 or more",
    "batch=25": "batch=25 cannot be divided evenly by fsdp=1 x replicas=2; use batch=24 or 26",
    "batch=24 accumulate=5": "cannot be divided evenly by fsdp=1 x replicas=2 x accumulate=5; use batch=20 or 30",
    "replicas=3 accumulate=4 batch=32": "use batch=24 or 36",
    "data.name=mnist": "model=gpt needs text ... use data.name=text",
    "data.name=digits model=net.py:Net": "gpt_parallel trains on text (got data.name=digits); use data.name=text",
    "data.name=set.py:read model=net.py:Net": "gpt_parallel trains on text (got data.name=set.py:read)",
    "loss=mse": "loss=mse is not available for text",
    "context=2 model=net.py:Net": "tensor, context, fsdp and stages divide model=gpt only",
    "dropout=0.2 model=net.py:Net": "dropout=0.2 applies to model=gpt only",
    "data.context=1": "data.context=1 ... int from 2",
    "data.name=mnist data.tokenizer=t.json": "data.tokenizer=t.json needs text, but data.name=mnist has none",
    "data.augment=crop": "data.augment=crop needs images, but data.name=text has none",
}
INVALID_STAGES = {
    "stages=5 layers=4": "stages=5 exceeds layers=4, and each stage needs a block; use stages=4, or more layers",
    "stages=4 stages_per_process=3": "stages=4 is not divisible by stages_per_process=3; valid values ... [1, 2, 4]",
    "stages=2 stages_per_process=2": "places all stages on one rank; use stages=1 stages_per_process=1",
    "stages=2 schedule=zbv": "schedule=zbv needs two stages per rank; set stages_per_process=2 ... such as stages=4",
    "stages=4 stages_per_process=2 schedule=dualpipev accumulate=2": "at least as many microbatches as stages ... the "
    "number of microbatches is accumulate",
    "stages=2 fsdp=2 schedule=zero_bubble": "schedule=zero_bubble cannot be combined with fsdp ... use schedule=1f1b",
    "processes_per_node=3 stages=4 stages_per_process=2": "cannot be divided evenly by stages=4 / "
    "stages_per_process=2 x fsdp=1 x context=1 x tensor=1; use processes_per_node=2",
}


LAYOUTS = {
    "": (2, 2),
    "replicas=1": (1, 1),
    "tensor=2": (2, 1),
    "context=2": (2, 1),
    "fsdp=2 tensor=2": (4, 1),
    "fsdp=2 replicas=2": (4, 2),
    "stages=2": (2, 1),
    "stages=4 stages_per_process=2 tensor=2": (4, 1),
    "processes_per_node=4 stages=2": (4, 2),
    "launch.nodes=2": (2, 2),
    "launch.nodes=2 tensor=2": (2, 1),
    "launch.nodes=4 tensor=2": (4, 2),
    "processes_per_node=4 tensor=2": (4, 2),
}


@pytest.mark.parametrize("settings, expected", LAYOUTS.items())
def test_the_number_of_ranks_follows_from_the_layout(settings: str, expected: tuple[int, int]) -> None:
    cfg = load_settings(*settings.split())
    assert (cfg.processes, cfg.layout.replicas) == expected


STARTED_RANKS = (
    ("", 4, 2, 4),
    ("tensor=2", 4, 2, 2),
    ("tensor=2", 2, 1, 1),
    ("fsdp=2 tensor=2", 4, 1, 1),
)


@pytest.mark.parametrize("settings, ranks, nodes, replicas", STARTED_RANKS)
def test_replicas_use_the_ranks_that_another_launcher_has_started(
    settings: str, ranks: int, nodes: int, replicas: int
) -> None:
    cfg = config.load_config(Config, settings.split(), {}, StartedRanks(ranks, nodes))
    assert (cfg.processes, cfg.launch.nodes, cfg.layout.replicas) == (ranks, nodes, replicas)


def test_ranks_of_another_launcher_that_do_not_fit_are_refused() -> None:
    with expect_refusal("processes_per_node=3 = 3, cannot be divided evenly by fsdp=1 x context=1 x tensor=2"):
        config.load_config(Config, ["tensor=2"], {}, StartedRanks(3, 1))
    cfg = config.load_config(Config, ["tensor=2", "replicas=1"], {}, StartedRanks(3, 1))
    assert cfg.processes == 2, "an explicit layout is compared with the started ranks later"


@pytest.mark.parametrize("ranks_per_node, nodes, replicas", [(1, 2, 1), (4, 1, 2)])
def test_replicas_use_the_ranks_of_a_cluster_profile(ranks_per_node: int, nodes: int, replicas: int) -> None:
    settings = load_settings("tensor=2", f"launch.nodes={nodes}")
    resolved = submit.resolve_processes_per_node(settings, Profile(processes=ranks_per_node))
    assert resolved.processes == ranks_per_node * nodes
    assert isinstance(resolved, Config)
    assert resolved.layout.replicas == replicas
    explicit = load_settings("tensor=2", "replicas=1")
    assert submit.resolve_processes_per_node(explicit, Profile(processes=4)) == explicit


def test_the_remedy_of_a_v_schedule_names_only_what_is_missing() -> None:
    with pytest.raises(UserError) as refused:
        load_settings("stages=4", "schedule=zbv")
    assert str(refused.value) == "schedule=zbv needs two stages per rank; set stages_per_process=2"
    load_settings("stages=4", "schedule=zbv", "stages_per_process=2")


@pytest.mark.parametrize("settings, message", (INVALID_SETTINGS | INVALID_STAGES).items())
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

INVALID_SAMPLE_OPTIONS = {
    "--temperature=-1": "TEMPERATURE must be a number from 0 to 100 (got '-1')",
    "--temperature=hot": "TEMPERATURE must be a number from 0 to 100 (got 'hot')",
    "--top-k=0": "TOP_K must be an integer from 1",
    "--seed=x": "SEED must be an integer from 0 to 99999 (got 'x')",
    "--seed=-1": "SEED must be an integer from 0 to 99999 (got '-1')",
}


def test_invalid_arguments_of_sample_are_refused(finished: GetRun, tmp_path: Path) -> None:
    text_run = finished(ENTRY_BY_NAME[NAME]).folder.path
    image_run = finished(STAGED_ENTRY).folder.path
    measurement = RunFolder.create(tmp_path, "measurement", "sizes: [4]\n").path
    cases = [(text_run, option, message) for option, message in INVALID_SAMPLE_OPTIONS.items()]
    no_model = "does not train a model, so it cannot continue a text; use a run with data.name=text"
    cases.append((measurement, "--text=a", no_model))
    cases.append((image_run, "--text=a", "was trained on data.name=digits, so it cannot continue a text"))
    for run, option, message in cases:
        completed = sample(run, option, status=2)
        assert message in completed.stderr
        assert completed.stderr.count("\n") == 1
