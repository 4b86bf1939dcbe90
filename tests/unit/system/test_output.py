"""Output that cannot be written, and streams that have no file."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.system.output import replace_stream
from tests.harness.warm import ROOT

COMMANDS = (["-m", "slurm", "status", "--runs-folder=RUNS"], ["experiments/mnist_pipeline.py", "--help"])


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


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_whose_output_is_on_a_full_disk_fails_with_one_message(command: list[str], tmp_path: Path) -> None:
    words = [sys.executable, *(word.replace("RUNS", str(tmp_path)) for word in command)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    remedy = "free disk space, or redirect the output to another file"
    message = f"error: cannot write standard output (No space left on device); {remedy}\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_a_command_whose_output_is_closed_succeeds_silently(tmp_path: Path) -> None:
    script = f'"{sys.executable}" -m slurm compare --runs-folder="{tmp_path}" >&-'
    done = subprocess.run(["/bin/sh", "-c", script], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
