"""Text data set: samples of bytes, the held-out part, losses of n-gram models, and unsuitable texts."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.data import prepare, text
from common.data.loader import Loader
from common.data.samples import open_samples
from common.data.text_samples import TextSamples, read_text_facts
from common.system.errors import UserError
from configs.shared import Data

CPU = torch.device("cpu")


def make_settings(root: Path, tmp_path: Path, context: int = 8) -> Data:
    return Data(name="text", root=str(root), cache=str(tmp_path / "cache"), context=context)


def prepare_text(content: bytes, tmp_path: Path, context: int = 8) -> prepare.PreparedDataset:
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    return prepare.prepare_dataset(make_settings(file, tmp_path, context))


def make_loader(samples: Any, **options: Any) -> Loader:
    return Loader(samples, 4, 0, CPU, torch.float32, **options)


def draw_text(length: int) -> bytes:
    """Return random letters, in which "a" is followed by "b" more often than by other letters."""
    generator = np.random.default_rng(0)
    letters = generator.integers(ord("a"), ord("e"), length, dtype=np.uint8)
    return letters.tobytes().replace(b"ac", b"ab")


def test_each_target_is_the_byte_after_its_input_and_the_end_of_the_text_is_held_out(tmp_path: Path) -> None:
    content = bytes(range(32, 127)) * 20
    prepared = prepare_text(content, tmp_path)
    train = open_samples(prepared, "train")
    test = open_samples(prepared, "test")
    assert isinstance(train, TextSamples)
    assert train.shape == prepared.sample_shape == (8,)
    assert train.outputs == 256
    held_out = round(len(content) * text.TEST_SHARE)
    expected = {"train": content[:-held_out], "test": content[-held_out:]}
    for part, samples in (("train", train), ("test", test)):
        count = (len(expected[part]) - 1) // 8
        assert len(samples) == count
        inputs = samples.load_inputs(slice(0, count), CPU, torch.float32)
        targets = samples.load_targets(slice(0, count), CPU, torch.float32)
        assert inputs.dtype == targets.dtype == torch.int64
        assert bytes(inputs.flatten().tolist()) == expected[part][: count * 8]
        assert bytes(targets.flatten().tolist()) == expected[part][1 : count * 8 + 1]


def test_batches_depend_on_seed_epoch_and_position_only_also_with_shards_and_data_workers(tmp_path: Path) -> None:
    samples = open_samples(prepare_text(draw_text(2000), tmp_path), "train")
    whole = [x for x, _ in make_loader(samples)]
    halves = zip(*(make_loader(samples, shard=(rank, 2), workers=rank) for rank in (0, 1)), strict=True)
    for batch, shards in zip(whole, halves, strict=True):
        joined = torch.cat([x for x, _ in shards])
        assert joined.dtype == torch.int64
        assert torch.equal(joined, batch)
    second = make_loader(samples)
    second.load_state_dict({"epoch": 0, "position": 8})
    assert torch.equal(next(iter(second))[0], whole[2])


def test_the_losses_of_n_gram_models_are_those_of_a_direct_computation(tmp_path: Path) -> None:
    prepared = prepare_text(draw_text(4000), tmp_path)
    facts = read_text_facts(prepared)
    train, test = (open_samples(prepared, part) for part in ("train", "test"))
    singles = np.ones(256)
    pairs = np.zeros((256, 256))
    for inputs, targets in zip(train.images.tolist(), train.labels.tolist(), strict=True):
        for token, following in zip(inputs, targets, strict=True):
            singles[following] += 1
            pairs[token, following] += 1
    singles /= singles.sum()
    unigram = []
    bigram = []
    for token, following in zip(test.images.flatten().tolist(), test.labels.flatten().tolist(), strict=True):
        unigram.append(-np.log(singles[following]))
        bigram.append(-np.log((pairs[token, following] + singles[following]) / (pairs[token].sum() + 1)))
    assert facts["unigram_loss"] == pytest.approx(np.mean(unigram), rel=1e-12)
    assert facts["bigram_loss"] == pytest.approx(np.mean(bigram), rel=1e-12)
    assert facts["bigram_loss"] < facts["unigram_loss"]


def test_the_loss_of_text_is_the_mean_over_tokens(tmp_path: Path) -> None:
    samples = open_samples(prepare_text(draw_text(1000), tmp_path), "train")
    targets = samples.load_targets(slice(0, 3), CPU)
    logits = torch.randn(3, *samples.output_shape, dtype=torch.float64)
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(samples.cross_entropy(logits, targets), expected)
    torch.testing.assert_close(samples.cross_entropy(logits, targets, reduction="sum"), 3 * expected)


def test_the_default_text_is_the_source_of_the_standard_library_with_its_license(tmp_path: Path) -> None:
    settings = Data(name="text", root="none", cache=str(tmp_path / "cache"), context=64)
    facts = read_text_facts(prepare.prepare_dataset(settings))
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    content = b"".join(file.read_bytes() for file in files)
    assert facts["sha256"] == hashlib.sha256(content).hexdigest()
    assert facts["files"] == len(files)
    assert "Python Software Foundation License" in facts["license"]
    assert 1 < facts["bigram_loss"] < facts["unigram_loss"] < 4


def test_a_folder_is_read_in_the_order_of_its_paths_without_hidden_files(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "part").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git/index").write_bytes(b"\0\0")
    (folder / "b.txt").write_text("b" * 50)
    (folder / "part/a.txt").write_text("a" * 50)
    settings = make_settings(folder, tmp_path)
    prepared = prepare.prepare_dataset(settings)
    assert read_text_facts(prepared)["sha256"] == hashlib.sha256(b"b" * 50 + b"a" * 50).hexdigest()
    (folder / "b.txt").write_text("c" * 50)
    changed = prepare.prepare_dataset(settings)
    assert changed.sha256 != prepared.sha256, "a changed text must be prepared again"


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("empty", b"", "the text has 0 tokens, but two samples of data.context=8 tokens need 18; lower data.context"),
        ("tiny", b"tiny text", "the text has 9 tokens, but two samples of data.context=8 tokens need 18"),
        ("binary", b"PNG\0\0" + bytes(100), "is a binary file, not text; set data.root to a UTF-8 text file"),
        ("latin", "caf\xe9 ".encode("latin-1") * 10, r"is not UTF-8 text \(byte 3\); convert the file to UTF-8"),
        (
            "shorter than the context",
            b"abcde",
            "the text has 5 tokens, but two samples of data.context=8 tokens need 18",
        ),
    ],
)
def test_unsuitable_texts_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        prepare_text(content, tmp_path)
    assert not list((tmp_path / "cache").glob("text-*"))


def test_a_missing_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file or folder; set data\.root to a UTF-8 text file"):
        prepare.prepare_dataset(make_settings(tmp_path / "missing", tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="the folder contains no files"):
        prepare.prepare_dataset(make_settings(tmp_path / "empty", tmp_path))


@pytest.mark.timeout(20)
def test_a_pipe_among_the_texts_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a" * 50)
    os.mkfifo(folder / "pipe")
    with pytest.raises(UserError, match=r"texts/pipe is not a regular file; remove it, or set data\.root to"):
        prepare.prepare_dataset(make_settings(folder, tmp_path))


def test_a_python_without_sources_is_refused_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match=r"has no source files \(\*\.py\); set data\.root to a UTF-8 text file"):
        prepare.prepare_dataset(Data(name="text", root="none", cache=str(tmp_path / "cache")))


def test_the_shortest_text_has_one_sample_in_each_part(tmp_path: Path) -> None:
    prepared = prepare_text(draw_text(18), tmp_path)
    assert [len(open_samples(prepared, part)) for part in ("train", "test")] == [1, 1]


def test_a_character_is_not_divided_if_the_tokens_are_not_bytes() -> None:
    content = "äöü".encode() * 10
    train, test = text.split_text(content, 8, whole_characters=True)
    assert (len(train), len(test)) == (50, 10)
    assert test.decode() == "öüäöü"
    assert [len(part) for part in text.split_text(content, 8, whole_characters=False)] == [51, 9]


def test_missing_facts_are_refused(tmp_path: Path) -> None:
    prepared = prepare_text(draw_text(1000), tmp_path)
    file = prepared.path / "text.json"
    facts = json.loads(file.read_text())
    for name in facts.keys() - {"files"}:  # no code needs the number of files
        file.write_text(json.dumps({key: value for key, value in facts.items() if key != name}))
        with pytest.raises(UserError, match=r"text\.json is missing or damaged; delete"):
            open_samples(prepared, "train")
