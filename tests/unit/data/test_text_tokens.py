"""Tokenizers of texts: files that contain none, a missing library, and texts of several pieces."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from common.data import prepare, text_tokens
from common.data.text_tokens import FileTokenizer, cut_at_line_breaks
from common.system.errors import UserError
from configs.shared import Data
from tests.harness.commands.refusals import expect_refusal

WORDS = {"[unknown]": 0, "red": 1, "green": 2, "blue": 300}
LIBRARY_REASON = "an optional package; pip install tokenizers"


def write_word_tokenizer(file: Path, unknown: str = "[unknown]") -> Path:
    """Write a tokenizer whose tokens are words."""
    model = {"type": "WordLevel", "vocab": WORDS, "unk_token": unknown}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    content = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model} | parts
    file.write_text(json.dumps(content))
    return file


@pytest.mark.parametrize(
    "content, problem",
    [
        (None, "cannot be read (No such file or directory)"),
        (b"", "is not a JSON file"),
        (b"PK\x03\x04\xff", "is not a JSON file"),
        (b"[1, 2]", "is a JSON file without a tokenizer"),
        (b'{"model": "gpt", "width": 128}', "is a JSON file without a tokenizer"),
    ],
)
def test_a_file_without_a_tokenizer_is_refused(content: bytes | None, problem: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("red green blue\n" * 20)
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_bytes(content)
    data = Data(
        name="text", root=str(tmp_path / "text.txt"), cache=str(tmp_path / "cache"), context=8, tokenizer=str(file)
    )
    with expect_refusal(f"data.tokenizer={file} {problem}; set data.tokenizer to a file tokenizer.json"):
        prepare.prepare_dataset(data)
    assert not (tmp_path / "cache").exists()


def test_a_missing_library_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # makes the import fail
    with expect_refusal("needs the package tokenizers; install it with .venv/bin/python -m pip install tokenizers"):
        FileTokenizer(write_word_tokenizer(tmp_path / "tokenizer.json"))


def test_a_tokenizer_that_the_library_cannot_read_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason=LIBRARY_REASON)
    file = tmp_path / "tokenizer.json"
    file.write_text('{"model": {"type": "Other"}}')
    with expect_refusal("cannot be read by the library tokenizers ("):
        FileTokenizer(file)


def test_tokens_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers", reason=LIBRARY_REASON)
    monkeypatch.setattr(text_tokens, "PIECE_BYTES", 12)
    tokenizer = FileTokenizer(write_word_tokenizer(tmp_path / "tokenizer.json"))
    assert tokenizer.vocabulary == 301, "the largest token plus one"
    tokens = tokenizer.encode("red blue\nblue grün green\nred".encode())
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [1, 300, 300, 0, 2, 1]
    assert tokenizer.decode([1, 300]) == "red blue"
    assert len(tokenizer.encode(b"")) == 0


def test_truncation_and_padding_in_the_file_have_no_effect(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers", reason=LIBRARY_REASON)
    file = write_word_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = library.Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(2)
    tokenizer.save(str(file))
    assert FileTokenizer(file).encode(b"red green blue").tolist() == [1, 2, 300]
    tokenizer.no_truncation()
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(file))
    assert FileTokenizer(file).encode(b"red green blue").tolist() == [1, 2, 300]


def test_unknown_characters_without_a_token_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason=LIBRARY_REASON)
    tokenizer = FileTokenizer(write_word_tokenizer(tmp_path / "tokenizer.json", unknown="[none]"))
    with expect_refusal("cannot encode the text (", "use a tokenizer with a token for unknown characters"):
        tokenizer.encode(b"red yellow")


def test_pieces_end_with_line_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_tokens, "PIECE_BYTES", 4)
    assert list(cut_at_line_breaks(b"abc\nde\nfghijk\nl\nm")) == [b"abc\n", b"de\nfghijk\n", b"l\nm"]
    assert list(cut_at_line_breaks(b"")) == []


def test_a_held_out_part_without_a_sample_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason=LIBRARY_REASON)
    (tmp_path / "text.txt").write_text("red green blue\n" * 200)
    file = write_word_tokenizer(tmp_path / "tokenizer.json")
    data = Data("text", str(tmp_path / "text.txt"), str(tmp_path / "cache"), context=40, tokenizer=str(file))
    with pytest.raises(UserError, match="the held-out end of the text has 30 tokens, but a sample"):
        prepare.prepare_dataset(data)
