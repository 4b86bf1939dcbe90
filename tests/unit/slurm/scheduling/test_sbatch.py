"""Job scripts and profiles: resources, escaping, and runs of an array."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from common.system.errors import UserError
from configs.profile import Profile
from slurm.scheduling import sbatch
from tests.harness.commands.refusals import expect_refusal
from tests.harness.repository import ROOT

EXPECTED_SCRIPT = """#!/bin/bash

# Parameters
#SBATCH --constraint=v100
#SBATCH --cpus-per-task=4
#SBATCH --gpus-per-node=a100:2
#SBATCH --job-name=mnist_pipeline
#SBATCH --mem=1536M
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --open-mode=append
#SBATCH --output=/runs/x-1-2-3/submit/%j_0_log.out
#SBATCH --partition=long
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=30

# setup
export PYTHONPATH=/runs/x-1-2-3/code PYTHONSAFEPATH=1
module load cuda

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /runs/x-1-2-3/submit/%j_%t_log.out --kill-on-bad-exit=1 --cpus-per-task=4 \
--container-image=a.sqsh PYTHON -u -m submitit.core._submit /runs/x-1-2-3/submit


# teardown
PYTHON -m slurm.scheduling.requeue /runs/x-1-2-3 $?"""


def make_script(profile: Profile, folder: Path) -> str:
    """Return the job script of a run on two nodes, with PYTHON instead of the interpreter's path."""
    parameters = sbatch.make_submitit_parameters(profile, "mnist_pipeline", 2, profile.ranks_per_node, folder)
    executor = sbatch.make_executor(RunFolder(folder), None, parameters)
    return executor.make_job_script().replace(sys.executable, "PYTHON")


def test_a_profile_determines_the_job_script(tmp_path: Path) -> None:
    profile = Profile(
        partition="long", constraint="v100", time=30, memory_gb=1.5, cpus=4, gpus=2, gpu_type="a100",
        signal_seconds=120, setup=["module load cuda"], container=["--container-image=a.sqsh"],
    )  # fmt: skip
    script = make_script(profile, tmp_path)
    assert script.replace(str(tmp_path), "/runs/x-1-2-3") == EXPECTED_SCRIPT
    written = (tmp_path / "submit" / "job.sh").read_text()
    assert written.replace(sys.executable, "PYTHON") == make_script(profile, tmp_path)


def test_a_job_requests_only_the_resources_of_its_profile(tmp_path: Path) -> None:
    script = make_script(Profile(requeue=False, gpus=1, gpus_as="gres"), tmp_path)
    assert "--gres=gpu:1" in script
    assert "--no-requeue" in script
    assert not re.search(r"wckey|partition|account|qos|mem", script)


INVALID_SETTINGS = [
    (["cluster.partion=x"], "unknown key partion; did you mean partition?"),
    (["cluster.time=0"], "time=0: out of range"),
    (["cluster.time=1"], "receives a stop request when it starts"),
    (["cluster.partition=a\n#SBATCH --uid=0"], "cluster.partition must not contain line breaks"),
    (["cluster.partition=a;b"], "only letters, digits"),
    (["cluster.qos=$(id)"], "only letters, digits"),
    (["cluster.gpus=1", "cluster.processes=2"], "each rank needs one GPU"),
]


@pytest.mark.parametrize("settings, message", INVALID_SETTINGS)
def test_invalid_profile_settings_are_refused(settings: list[str], message: str) -> None:
    with expect_refusal(message):
        sbatch.load_profile("default", settings)


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(UserError, match=r"unknown CLUSTER=nowhere; choose one of .*default"):
        sbatch.load_profile("nowhere", [])


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs" / "cluster").glob("*.yaml")))
def test_every_profile_is_valid(name: str) -> None:
    assert sbatch.load_profile(name, []).ranks_per_node >= 1


@pytest.mark.parametrize("path", ["/a'b", '/a"b', "/a\nb", "/a%j", "/a$b", "/a`b", "/a\\b", "/a;b", "/a&b", "/a:b"])
def test_paths_that_a_job_script_cannot_contain_are_refused(path: str) -> None:
    with pytest.raises(UserError, match="is not allowed in a job script"):
        sbatch.make_executor(RunFolder(Path(path)), None, {})


def test_each_task_of_an_array_finds_its_run(tmp_path: Path) -> None:
    run_paths = [tmp_path / "runs" / f"run {letter}" for letter in "abc"]
    tasks = tmp_path / "tasks's.txt"
    tasks.write_text("".join(f"{path}\n" for path in run_paths))
    parameters = sbatch.make_submitit_parameters(Profile(), "mnist_pipeline", 1, 2, tmp_path, tasks)
    (line,) = (line for line in parameters["setup"] if line.startswith("RUN="))
    script = f'{line}\nprintf %s "$RUN"'
    for number, run_path in enumerate(run_paths):
        env = {"SLURM_ARRAY_TASK_ID": str(number), "PATH": os.environ["PATH"]}
        process = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True)
        assert process.stdout == str(run_path)
