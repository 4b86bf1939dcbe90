"""Output that cannot be written, and streams that have no file."""

from __future__ import annotations

import io
import os

import pytest

from common.system.output import replace_stream


def test_output_is_discarded_when_its_reader_is_too_slow(capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with open(reader, "rb") as pipe, open(writer, "w") as stream:
        replaced = replace_stream(stream, warns=True)
        for _ in range(20):
            print("x" * 8192, file=replaced)
        warning = "WARNING: cannot write standard output (its reader is too slow)"
        assert capsys.readouterr().err == f"{warning}; the run continues, see its run folder\n"
        pipe.read1(1 << 20)
        print("the reader is back", file=replaced, flush=True)
        assert pipe.read1(1 << 20) == b"the reader is back\n"


def test_a_stream_without_a_file_is_kept() -> None:
    stream = io.StringIO()
    assert replace_stream(stream, warns=True) is stream
