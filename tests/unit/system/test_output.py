"""Output that cannot be written, and streams without a file."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.system.output import replace_stream
from tests.harness.repository import ROOT


def test_output_is_discarded_while_its_reader_is_too_slow(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_output_on_a_full_disk_is_discarded_with_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w") as stream:
        replaced = replace_stream(stream, warns=True)
        for _ in range(3):
            print("x" * 8192, file=replaced, flush=True)
    warning = "WARNING: cannot write standard output (No space left on device)"
    assert capsys.readouterr().err == f"{warning}; the run continues, see its run folder\n"


def test_a_stream_without_a_file_is_not_replaced() -> None:
    stream = io.StringIO()
    assert replace_stream(stream, warns=True) is stream


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [["-m", "slurm", "status", "--runs-folder={runs}"], ["experiments/mnist_pipeline.py", "--help"]],
    ids=["status", "help"],
)
def test_a_command_that_writes_to_a_full_disk_fails_with_one_message(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, *(argument.format(runs=tmp_path) for argument in arguments)]
    with open("/dev/full", "w") as full_disk:
        process = subprocess.run(command, cwd=ROOT, stdout=full_disk, stderr=subprocess.PIPE, text=True, check=False)
    remedy = "free disk space, or redirect the output to another file"
    assert process.returncode == 2
    assert process.stderr == f"error: cannot write standard output (No space left on device); {remedy}\n"


def test_a_command_with_closed_output_prints_no_traceback(tmp_path: Path) -> None:
    shell_script = f'"{sys.executable}" -m slurm compare --runs-folder="{tmp_path}" >&-'
    process = subprocess.run(["sh", "-c", shell_script], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert "Traceback" not in process.stderr, process.stderr
