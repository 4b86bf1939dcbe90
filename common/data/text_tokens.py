"""Tokens of a text: its bytes, or the tokens of a file `tokenizer.json` of the library tokenizers.

The library is optional, and is imported only to read such a file. This module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from common.data import sources
from common.system.errors import UserError, summarize_error

PIECE_BYTES = 2**20
"""Approximate number of bytes of a text that are encoded at once."""
REMEDY = "set data.tokenizer to a file tokenizer.json of the library tokenizers, or omit it to use bytes as tokens"


class Tokenizer(Protocol):
    """Conversion of a text to tokens and back."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens, which are the integers from 0 to vocabulary - 1."""
        ...

    def encode(self, text: bytes) -> np.ndarray:
        """Return the tokens [N] of a UTF-8 text, with the smallest unsigned integer type that holds the vocabulary."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Bytes that are not valid UTF-8 are replaced."""
        ...


class ByteTokenizer:
    """The tokens of a text are its bytes."""

    vocabulary = 256

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class FileTokenizer:
    """The tokens are those of a file `tokenizer.json`.

    No special tokens are added to a text. Truncation and padding in the file have no effect.
    """

    def __init__(self, file: Path) -> None:
        """Read a tokenizer. Raises UserError if the file is invalid or the library is not installed."""
        check_tokenizer_file(file)
        try:
            import tokenizers  # an optional package
        except ImportError:
            problem = f"data.tokenizer={file} needs the package tokenizers"
            raise UserError(f"{problem}; install it with .venv/bin/python -m pip install tokenizers") from None
        try:
            self.library_tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 (the library raises Exception)
            problem = f"data.tokenizer={file} cannot be read by the library tokenizers ({summarize_error(error)})"
            raise UserError(f"{problem}; {REMEDY}") from None
        # The file may contain the settings of another program, which cuts texts to one length.
        self.library_tokenizer.no_truncation()
        self.library_tokenizer.no_padding()
        self.file = file
        ids = self.library_tokenizer.get_vocab().values()
        self.vocabulary = max(ids, default=0) + 1

    def encode(self, text: bytes) -> np.ndarray:
        dtype = np.min_scalar_type(self.vocabulary - 1)
        parts = [np.zeros(0, dtype)]
        for piece in cut_at_line_breaks(text):
            try:
                encoding = self.library_tokenizer.encode(piece.decode(errors="replace"), add_special_tokens=False)
            except Exception as error:  # noqa: BLE001 (the library raises Exception)
                problem = f"data.tokenizer={self.file} cannot encode the text ({summarize_error(error)})"
                raise UserError(f"{problem}; use a tokenizer with a token for unknown characters") from None
            parts.append(np.array(encoding.ids, dtype))
        return np.concatenate(parts)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.library_tokenizer.decode(list(tokens), skip_special_tokens=False))


def cut_at_line_breaks(text: bytes) -> Iterator[bytes]:
    """Yield pieces of a text of at least PIECE_BYTES bytes that end with a line break, and the remaining text."""
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + PIECE_BYTES - 1) + 1 or len(text)
        yield text[start:end]
        start = end


def check_tokenizer_file(file: Path) -> None:
    """Raise UserError if a file does not exist or does not contain a tokenizer."""
    try:
        content: Any = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"data.tokenizer={file} cannot be read ({error.strerror}); {REMEDY}") from None
    except ValueError:  # not JSON, or not UTF-8
        raise UserError(f"data.tokenizer={file} is not a JSON file; {REMEDY}") from None
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise UserError(f"data.tokenizer={file} is a JSON file without a tokenizer; {REMEDY}")


def open_tokenizer(file: Path | None) -> Tokenizer:
    """Return the tokenizer in a file, or bytes as tokens if there is no file. Raises UserError."""
    return ByteTokenizer() if file is None else FileTokenizer(file)


def open_tokenizer_of_run(code: Path, *, has_file: bool) -> Tokenizer:
    """Return the tokenizer of a run with the source folder `code`. `has_file` is False if the tokens are bytes.

    Raises UserError if the run's copy of the file is missing or invalid.
    """
    if not has_file:
        return ByteTokenizer()
    file = code / sources.RUN_TOKENIZER_FILE
    if not file.is_file():
        raise UserError(f"{file} is missing; restore this file, which defines the tokens of the model")
    return FileTokenizer(file)


def locate_tokenizer(setting: str, code: Path | None) -> Path | None:
    """Return the file of the setting `data.tokenizer`, or None for bytes.

    `code` is the source folder of an existing run, whose copy of the file is used if it exists.
    """
    if setting == "none":
        return None
    copy = code / sources.RUN_TOKENIZER_FILE if code else None
    return copy if copy and copy.is_file() else Path(setting)
