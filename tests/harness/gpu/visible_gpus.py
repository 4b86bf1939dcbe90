"""Hide the GPUs of this machine from all tests except those of tests/gpu.

With a visible GPU, a run with one rank would use it by default, and other tests expect CPUs.
"""

from __future__ import annotations

import os
from pathlib import Path

HIDDEN_GPUS_VARIABLE = "TESTS_HIDDEN_GPUS"
"""Environment variable with the GPUs that pytest has hidden, as a value of CUDA_VISIBLE_DEVICES."""


def hide_gpus() -> None:
    """Hide all GPUs from this process and its child processes, and remember which ones were visible."""
    device_files = Path("/dev").glob("nvidia*")
    count = sum(path.name.removeprefix("nvidia").isdigit() for path in device_files)
    all_gpus = ",".join(map(str, range(count)))
    os.environ.setdefault(HIDDEN_GPUS_VARIABLE, os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def get_hidden_gpus() -> str:
    """Return the value of CUDA_VISIBLE_DEVICES with which a command sees the hidden GPUs; empty without GPUs."""
    return os.environ.get(HIDDEN_GPUS_VARIABLE, "")
