"""Messages of srun as the launcher of an elastic job reads them; tests/cluster/test_elastic.py has the rest."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace

from slurm.scheduling.elastic_launcher import KILLED, JobLauncher, JobStep

SAID = """srun: error: node2: tasks 0,2-3: Killed
srun: error: node1: task 1: Exited with exit code 76
srun: error: node3: task 4: Segmentation fault (core dumped)
srun: error: Node failure on node3
"""


def test_srun_tells_which_ranks_have_ended_and_how() -> None:
    process = subprocess.Popen(["sh", "-c", 'printf "%s" "$1" >&2', "sh", SAID], stderr=subprocess.PIPE)
    process.wait()
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    step = JobStep(process, [5, 6, 7, 8, 9])
    assert list(step.read_endings()) == [(5, KILLED), (7, KILLED), (8, KILLED), (6, 76), (9, KILLED)]
    assert not list(step.read_endings())


def test_the_loss_of_an_irreplaceable_rank_ends_the_job_though_slurm_says_nothing() -> None:
    """As where its host is cut off: SLURM takes minutes to notice."""
    launcher = JobLauncher.__new__(JobLauncher)
    launcher.steps, launcher.failed = [], 0
    launcher.coordinator = SimpleNamespace(broken=False)  # type: ignore[assignment]
    launcher.note_endings()
    assert not launcher.failed
    launcher.coordinator.broken = True
    launcher.note_endings()
    assert launcher.failed == KILLED
