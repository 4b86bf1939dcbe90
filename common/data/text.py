"""Text data set: a UTF-8 file or folder, or the source text of Python's standard library.

The tokens are the bytes of the text, or those of `data.tokenizer` (text_tokens.py). The text is cut into samples of
`data.context` tokens. The target of each token is the token that follows it. The last part of the text is held out as
the test part. text_samples.py reads the samples.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.data import prepare, sources
from common.data.text_tokens import Tokenizer, locate_tokenizer, open_tokenizer
from common.runs.folder import convert_disk_errors
from common.system.causes import Cause
from common.system.errors import UserError
from configs.shared import Data

TEXT_VERSION = 1  # increase this number whenever a code change alters the arrays of the same text
BLOCK_SAMPLES = 10_000  # number of samples whose pairs of tokens are counted at once
TEST_SHARE = 0.05  # part of the text, at its end, that is held out for evaluation
LIBRARY_LICENSE = "Python Software Foundation License, https://docs.python.org/3/license.html"
REMEDY = "set data.root to a UTF-8 text file, or to a folder of text files"


def prepare_text(data: Data, code: Path | None = None) -> prepare.PreparedDataset:
    """Find or prepare the text in `data.root`. The value none selects the source text of the standard library.

    `code`, the source folder of a resumed run, contains the tokenizer, but no text.

    Raises UserError if there is no text, if a file is not UTF-8 text, if the text is shorter than two samples, or if
    the tokenizer is invalid.
    """
    is_library = data.root == "none"
    files = list_library_files() if is_library else list_text_files(Path(data.root))
    state = f"{fingerprint_files(files)} context {data.context} version {TEXT_VERSION}"
    tokenizer_file = locate_tokenizer(data.tokenizer, code)
    tokenizer = open_tokenizer(tokenizer_file)
    tokenizer_facts = {}
    if tokenizer_file is not None:
        tokenizer_facts = {"tokenizer_sha256": prepare.hash_file(tokenizer_file)}
        state += f" tokenizer {tokenizer_facts['tokenizer_sha256']}"

    def write_arrays(folder: Path) -> str:
        text = read_text(files)
        origin: dict[str, Any] = {"files": len(files), "bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        if is_library:
            origin |= {"source": "Python's standard library", "license": LIBRARY_LICENSE}
        write_samples(folder, text, tokenizer, data, origin | tokenizer_facts)
        if tokenizer_file is not None:
            with convert_disk_errors(folder.parent):
                shutil.copyfile(tokenizer_file, folder / sources.TOKENIZER_FILE)
        return ""

    return prepare.find_or_prepare_dataset(Path(data.cache), "text", state, write_arrays)


def list_library_files() -> list[Path]:
    """Return the top-level source files of Python's standard library. Raises UserError if there are none."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if not files:
        raise UserError(f"Python's standard library in {folder} has no source files (*.py); {REMEDY}")
    return files


def list_text_files(root: Path) -> list[Path]:
    """Return a text file, or the sorted files below a folder, except hidden files.

    Raises UserError if there are none.
    """
    if os.path.isfile(root):
        return [root]
    if not os.path.isdir(root):
        raise UserError(f"data.root={root}: no such file or folder; {REMEDY}")
    files = []
    for name in sources.list_files(root):
        if not any(part.startswith(".") for part in Path(name).parts):
            files.append(root / name)
    if not files:
        raise UserError(f"data.root={root}: the folder contains no files; {REMEDY}")
    return files


@contextlib.contextmanager
def name_unreadable_file(file: Path) -> Iterator[None]:
    """Raise UserError with the name of the file instead of an OSError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); repair or remove this file") from None


def fingerprint_files(files: Sequence[Path]) -> str:
    """Return a string that changes whenever a file is added, removed or replaced.

    Raises UserError if a file cannot be read or is not a regular file.
    """
    lines = []
    for file in files:
        with name_unreadable_file(file):
            status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe could block forever
            raise UserError(f"{file} is not a regular file; remove it, or {REMEDY}")
        lines.append(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}\n")
    return hashlib.sha256(os.fsencode("".join(lines))).hexdigest()


def read_text(files: Sequence[Path]) -> bytes:
    """Return the joined content of text files. Raises UserError if a file is not UTF-8 text."""
    parts = []
    for file in files:
        with name_unreadable_file(file):
            content = file.read_bytes()
        if b"\0" in content:
            raise UserError(f"{file} is a binary file, not text; {REMEDY}", cause=Cause.DAMAGED_DATA)
        try:
            content.decode()
        except UnicodeDecodeError as error:
            problem = f"{file} is not UTF-8 text (byte {error.start}); convert the file to UTF-8, or remove it"
            raise UserError(problem, cause=Cause.DAMAGED_DATA) from None
        parts.append(content)
    return b"".join(parts)


def write_samples(folder: Path, text: bytes, tokenizer: Tokenizer, data: Data, origin: dict[str, Any]) -> None:
    """Write the samples of the training and the test part, and the facts about the text.

    `origin` describes where the text comes from. Raises UserError if the text is too short.
    """
    context = data.context
    train_text, test_text = split_text(text, context, whole_characters=data.tokenizer != "none")
    train_tokens = tokenizer.encode(train_text)
    test_tokens = tokenizer.encode(test_text)
    train_inputs, train_targets = cut_samples(train_tokens, context)
    test_inputs, test_targets = cut_samples(test_tokens, context)
    remedy = "lower data.context, or use a longer text"
    if not len(train_inputs):
        count = len(train_tokens) + len(test_tokens)
        problem = (
            f"the text has {count} tokens, but two samples of data.context={context} tokens need {2 * context + 2}"
        )
        raise UserError(f"data.root={data.root}: {problem}; {remedy}")
    if not len(test_inputs):
        problem = f"the held-out end of the text has {len(test_tokens)} tokens"
        needed = f"a sample of data.context={context} tokens needs {context + 1}"
        raise UserError(f"data.root={data.root}: {problem}, but {needed}; {remedy}")
    vocabulary = tokenizer.vocabulary
    facts = origin | {
        "vocabulary": vocabulary,
        "test_bytes_per_token": len(test_text) / len(test_tokens),
        "test_tokens": test_targets.size,
        "unigram_loss": compute_unigram_loss(train_targets, test_targets, vocabulary),
        "bigram_loss": compute_bigram_loss((train_inputs, train_targets), (test_inputs, test_targets), vocabulary),
    }
    arrays = (train_inputs, train_targets, test_inputs, test_targets)
    with convert_disk_errors(folder.parent):
        for part, array in zip(prepare.PARTS, arrays, strict=True):
            np.save(folder / f"{part}.npy", array)
        (folder / sources.TEXT_FILE).write_text(json.dumps(facts, indent=2) + "\n")


def split_text(text: bytes, context: int, *, whole_characters: bool) -> tuple[bytes, bytes]:
    """Return the training part and the test part of a UTF-8 text.

    With `whole_characters`, the parts are not divided within a character.
    """
    start = max(0, len(text) - max(round(len(text) * TEST_SHARE), context + 1))
    while whole_characters and 0 < start < len(text) and text[start] & 0xC0 == 0x80:  # a later byte of a character
        start -= 1
    return text[:start], text[start:]


def cut_samples(tokens: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and the targets [N, context] of a text. The tokens of the last partial sample are dropped.

    Each target is the token that follows the input at the same position.
    """
    count = max(0, len(tokens) - 1) // context
    input_count = count * context
    return tokens[:input_count].reshape(count, context), tokens[1 : input_count + 1].reshape(count, context)


def compute_unigram_loss(train: np.ndarray, test: np.ndarray, vocabulary: int) -> float:
    """Return the cross-entropy of test tokens, in nats per token, if their frequencies are those of training tokens.

    Each count is increased by one, so that no token has the probability zero.
    """
    log_probabilities = np.log(estimate_frequencies(train, vocabulary))
    return float(-log_probabilities[test].mean())


def compute_bigram_loss(
    train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], vocabulary: int
) -> float:
    """Return the cross-entropy of test targets, in nats per token, given only the token before each target.

    The arguments are inputs and targets. The frequencies after each token are those in the training part, with one
    additional count that is distributed like the single tokens (Dirichlet prior, MacKay and Peto 1995). Only the pairs
    of the test part are counted, because a table of all pairs would be too large for a large vocabulary.
    """
    test_inputs, test_targets = test
    test_pairs, pair_indices = np.unique(number_pairs(test_inputs, test_targets, vocabulary), return_inverse=True)
    counts = np.zeros(len(test_pairs), np.int64)
    for start in range(0, len(train[0]), BLOCK_SAMPLES):
        inputs, targets = (part[start : start + BLOCK_SAMPLES] for part in train)
        pairs, pair_counts = np.unique(number_pairs(inputs, targets, vocabulary), return_counts=True)
        _, test_positions, positions = np.intersect1d(test_pairs, pairs, assume_unique=True, return_indices=True)
        counts[test_positions] += pair_counts[positions]

    prior = estimate_frequencies(train[1], vocabulary)
    input_counts = np.bincount(train[0].ravel(), minlength=vocabulary)
    pair_numbers = counts[pair_indices.ravel()] + prior[test_targets.ravel()]
    return float(-np.log(pair_numbers / (input_counts[test_inputs.ravel()] + 1)).mean())


def number_pairs(inputs: np.ndarray, targets: np.ndarray, vocabulary: int) -> np.ndarray:
    """Return a number for each pair of an input and a target, as a vector."""
    return inputs.ravel().astype(np.int64) * vocabulary + targets.ravel()


def estimate_frequencies(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """Return the relative frequency of each token [vocabulary], with all counts increased by one."""
    counts = np.bincount(tokens.ravel(), minlength=vocabulary) + 1.0
    frequencies: np.ndarray = counts / counts.sum()
    return frequencies
