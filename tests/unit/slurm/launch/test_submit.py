"""Giving a run to SLURM, against a scheduler faked at the command line: right, failing, hanging, missing."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from common.config import config, custom_code
from common.config.yaml_values import flatten_mapping
from common.data import prepare
from common.runs import provenance
from common.runs.folder import RunFolder, write_json
from common.runs.tracking.wandb_rows import TrackingNote, write_note
from common.system.errors import UserError
from common.system.processes import Process
from common.techniques.pipeline import schedules
from common.training import custom_optimizer
from common.training.attempt import prepare_data_of_run
from configs import mnist_pipeline, resnet_modelparallel
from configs.profile import Profile
from slurm.__main__ import main as slurm_main
from slurm.arguments import check_experiment_name
from slurm.launch.submit import check_source_knows_settings, prepare_run_folder, submit_prepared_run
from slurm.reports import cancel, diagnosis, logs, status
from slurm.scheduling import sbatch, scheduler
from tests.harness import inside
from tests.harness.fake_slurm import Fake, call, call_here, report
from tests.harness.made_runs import Made
from tests.harness.own_data import write_example, write_schedule
from tests.harness.warm import ROOT

GOLDEN = """#!/bin/bash

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


def text_of(profile: Profile, folder: Path) -> str:
    asked = sbatch.make_submitit_parameters(profile, "mnist_pipeline", 2, profile.ranks_per_node, folder)
    return sbatch.make_executor(RunFolder(folder), None, asked).make_job_script().replace(sys.executable, "PYTHON")


def test_the_text_for_sbatch_is_this_one(tmp_path: Path) -> None:
    profile = Profile(
        partition="long", constraint="v100", time=30, memory_gb=1.5, cpus=4, gpus=2, gpu_type="a100",
        signal_seconds=120, setup=["module load cuda"], container=["--container-image=a.sqsh"],
    )  # fmt: skip
    found = text_of(profile, tmp_path).replace(str(tmp_path), "/runs/x-1-2-3")
    assert found == GOLDEN
    assert (tmp_path / "submit" / "job.sh").read_text().replace(sys.executable, "PYTHON") == text_of(profile, tmp_path)


def test_a_plain_profile_asks_for_nothing_special(tmp_path: Path) -> None:
    text = text_of(Profile(requeue=False, gpus=1, gpus_as="gres"), tmp_path)
    assert "--gres=gpu:1" in text and "--no-requeue" in text
    assert not re.search(r"wckey|partition|account|qos|mem", text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.partion=x"], "unknown key partion; did you mean partition?"),
        (["cluster.time=0"], "time=0: out of range"),
        (["cluster.time=1"], "receives a stop request when it starts"),
        (["cluster.partition=a\n#SBATCH --uid=0"], "cluster.partition must not contain line breaks"),
        (["cluster.partition=a;b"], "only letters, digits"),
        (["cluster.qos=$(id)"], "only letters, digits"),
        (["cluster.gpus=1", "cluster.processes=2"], "each rank needs one GPU"),
    ],
)
def test_bad_profiles_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        sbatch.load_profile("default", words)
    assert message in str(caught.value)
    with pytest.raises(UserError, match=r"unknown CLUSTER=nowhere; choose one of .*default"):
        sbatch.load_profile("nowhere", [])


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs" / "cluster").glob("*.yaml")))
def test_every_profile_is_valid(name: str) -> None:
    assert sbatch.load_profile(name, []).ranks_per_node >= 1


@pytest.mark.parametrize("path", ["/a'b", '/a"b', "/a\nb", "/a%j", "/a$b", "/a`b", "/a\\b", "/a;b", "/a&b"])
def test_paths_that_a_script_cannot_hold_are_refused(path: str) -> None:
    with pytest.raises(UserError, match="is not allowed in a job script"):
        sbatch.make_executor(RunFolder(Path(path)), None, {})


@pytest.mark.parametrize("name", ["$(id)", "`id`", "a;id", "a\n#SBATCH --uid=0", "../x", "a b"])
def test_hostile_names_are_no_experiments(name: str) -> None:
    with pytest.raises(UserError, match="unknown experiment"):
        check_experiment_name(name)


def test_jobs_inherit_no_leftovers() -> None:
    environ = {
        "SLURM_CPU_BIND": "quiet", "SLURM_MEM_PER_NODE": "1", "SLURM_CONF": "/c", "SBATCH_PARTITION": "x", "RANK": "0",
        "TORCHELASTIC_RUN_ID": "1", "HOME": "/h", "WANDB_API_KEY": "k", "PATH": "/bin",
    }  # fmt: skip
    kept = {"SLURM_CONF": "/c", "HOME": "/h", "WANDB_API_KEY": "k", "PATH": "/bin"}
    assert scheduler.remove_launcher_variables(environ) == kept


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def words_of(fake: Fake, cache: Path, *options: str, settings: str = "") -> tuple[str, ...]:
    args = f"data.name=digits data.cache={cache} runs={fake.bin.parent}/runs {settings}"
    return ("exp", f"--args={args}", *options, "--", "mnist_pipeline")


def submit(fake: Fake, cache: Path, *options: str, settings: str = "", **more: Any) -> subprocess.CompletedProcess[str]:
    return call(fake, "slurm", *words_of(fake, cache, *options, settings=settings), **more)


def submit_here(fake: Fake, cache: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Submit within this process."""
    return call_here(fake, slurm_main, *words_of(fake, cache, *options), **env)


def the_folder(fake: Fake) -> RunFolder:
    (path,) = (fake.bin.parent / "runs").iterdir()
    return RunFolder(path)


def test_a_run_is_submitted_with_all_it_needs(fake: Fake, cache: Path) -> None:
    done = submit(fake, cache, "--nodes=2")
    assert done.returncode == 0, done.stderr
    assert "job 4711 on SLURM, 2 nodes, 2 ranks" in done.stdout
    assert "make logs RUN=" in done.stdout and "make cancel RUN=" in done.stdout
    folder = the_folder(fake)
    assert (folder.path / "code" / "experiments" / "mnist_pipeline.py").exists()
    assert "#SBATCH --nodes=2" in (folder.path / "submit" / "job.sh").read_text()
    meta = json.loads((folder.path / "meta.json").read_text())
    assert meta["job"]["id"] == "4711" and meta["data"]["name"] == "digits"
    assert not folder.list_attempts(), "the job claims the attempt"
    assert re.search(r"nodes: 2", (folder.path / "config.yaml").read_text())


def test_the_files_of_ones_own_are_in_the_source_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, order = write_example(tmp_path), write_schedule(tmp_path)
    monkeypatch.chdir(tmp_path)
    optimizer, decay = (write_example(tmp_path, name) for name in ("lion.py", "halving.py"))
    own = [f"optim.name={optimizer.name}:Lion", f"optim.decay={decay.name}:halve"]
    words = [f"data.name={file.name}:load", f"schedule={order.name}:own", *own, "data.cache=sets", "runs=mine"]
    folder = prepare_run_folder("mnist_pipeline", config.load_config(mnist_pipeline.Config, words, {}), None, set())
    assert (folder.path / "code" / "own" / "data.py").read_text() == file.read_text()
    monkeypatch.chdir("/")  # where the job may start
    written = config.load_config(mnist_pipeline.Config, ["--resume", str(folder.path)], {})
    custom_code.check_custom_settings(written, folder.path / "code")
    with pytest.raises(UserError, match=r"name an existing FILE\.py:function, or use one of naive, gpipe, 1f1b"):
        schedules.check_schedule_of_config(written)
    with pytest.raises(UserError, match=r"name an existing FILE\.py:Class, or use one of sgd, adam, adamw, lars, lamb"):
        custom_optimizer.check_custom_optimizer(written.optim)
    found = prepare.prepare_dataset(written.data, code=folder.path / "code")
    assert found.name == "shapes.py:load" and found.path.parent == tmp_path / "sets"


def test_every_path_of_a_job_is_absolute_and_its_notice_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "data.samples=64",
        "data.image_size=8",
        "weights=start.pt",
        "data.root=raw",
        "data.cache=sets",
        "runs=mine",
    ]
    shown: set[str] = set()
    settings = config.load_config(resnet_modelparallel.Config, words, {})
    folder = prepare_run_folder("resnet_modelparallel", settings, None, shown)
    written = flatten_mapping(config.read_config_file(folder.path / "config.yaml"))
    assert folder.path.parent == tmp_path / "mine"
    found = [written[key] for key in ("weights", "data.root", "data.cache", "runs")]
    assert found == [str(tmp_path / name) for name in ("start.pt", "raw", "sets", "mine")]
    settings = config.load_config(resnet_modelparallel.Config, words[:2], {})
    none = prepare_run_folder("resnet_modelparallel", settings, None, shown)
    assert capsys.readouterr().out.count("generated images: ") == 1, "a notice is printed once for all runs of a sweep"
    assert config.read_config_file(none.path / "config.yaml")["weights"] == "none"


def test_a_job_uses_the_data_set_that_was_there_when_it_was_submitted(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_ROOT", str(tmp_path))  # without MNIST
    words = [f"data.cache={cache}", f"runs={tmp_path / 'runs'}", "data.download_timeout=0"]
    folder = prepare_run_folder("mnist_pipeline", config.load_config(mnist_pipeline.Config, words), None, set())
    settings = config.build_config(mnist_pipeline.Config, [config.read_config_file(folder.path / "config.yaml")])
    assert settings.data.name == "mnist" and config.find_changes(folder.path, settings) == {}
    assert prepare_data_of_run(settings, folder).name == config.read_settings(folder.path)["data.name"] == "digits"
    (folder.path / "resolved.yaml").unlink()
    with pytest.raises(UserError, match=r"was trained on data\.name=digits, but its resolved\.yaml no longer contains"):
        prepare_data_of_run(settings, folder)
    (folder.path / "resolved.yaml").write_text("data.name: digits\n")  # the remedy of the message
    assert prepare_data_of_run(settings, folder).name == "digits"


def test_new_and_changed_files_belong_to_the_run(fake: Fake, cache: Path) -> None:
    provenance.copy_source(RunFolder(fake.bin.parent))  # a checkout of its own: other tests copy ROOT at the same time
    checkout = fake.bin.parent / "code"
    for words in ("init -q", "add -A", "-c user.name=x -c user.email=x@x commit -qm x"):
        subprocess.run(["git", "-C", str(checkout), *words.split()], check=True)
    assert submit(fake, cache, "--strict=1", "--dry-run=1", source=checkout).returncode == 0
    (checkout / "common" / "brand_new_file.py").write_text("x = 1\n")
    assert submit(fake, cache, source=checkout).returncode == 0
    strict = submit(fake, cache, "--strict=1", source=checkout)
    assert (the_folder(fake).path / "code" / "common" / "brand_new_file.py").exists()
    assert strict.returncode == 2 and "STRICT=1" in strict.stderr


def test_dry_run_leaves_no_trace(fake: Fake, cache: Path) -> None:
    done = submit_here(fake, cache, "--dry-run=1", "--nodes=2")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=2" in done.stdout and "microbatches: 4" in done.stdout
    assert not fake.calls.exists() and not (fake.bin.parent / "runs").exists()


def test_a_dry_run_has_the_ranks_that_the_job_would_have(fake: Fake) -> None:
    for words, tasks in (("cluster.gpus=4", 4), ("processes_per_node=2", 2), ("", 1)):
        done = inside.run_verb(
            "exp", "--dry-run=1", f"--args={words}", "--", "ddp_multinode", cwd=ROOT, **fake.environment()
        )
        assert f"#SBATCH --ntasks-per-node={tasks}\n" in done.stdout, done.stderr
        assert f"processes_per_node: {tasks}\n" in done.stdout


@pytest.mark.parametrize("dry", ["0", "1"])
def test_settings_that_do_not_fit_the_ranks_of_a_job_are_refused_before_it_is_submitted(fake: Fake, dry: str) -> None:
    runs = fake.bin.parent / "runs"
    for words, message in (("elastic=true", "requires at least two ranks"), ("batch=66 cluster.gpus=4", "batch=66")):
        args = f"--args={words} runs={runs}"
        done = inside.run_verb(
            "exp", f"--dry-run={dry}", "--launch=slurm", args, "--", "ddp_multinode", cwd=ROOT, **fake.environment()
        )
        assert done.returncode == 2 and message in done.stderr, done.stdout + done.stderr
    assert not runs.exists()


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("scontrol", "echo 'Slurmctld(primary) at ctl is DOWN'", "the controller does not answer"),
        (
            "scontrol",
            "printf 'Slurmctld(primary) at ctl is DOWN\\n*****\\n** RESTORE IT **\\n*****\\n'; exit 1",
            "SLURM: the controller does not answer (Slurmctld(primary) at ctl is DOWN); try later",
        ),
        ("scontrol", "echo 'slurm_load: Unable to contact controller' >&2; exit 1", "Unable to contact"),
        (
            "sbatch",
            "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1",
            "invalid partition specified: x",
        ),
        ("sbatch", "echo 'sbatch: error: More processors requested than permitted' >&2; exit 1", "More processors"),
    ],
)
def test_refusals_are_passed_on_and_leave_nothing(fake: Fake, cache: Path, name: str, body: str, message: str) -> None:
    fake.answer(name, body)
    done = submit_here(fake, cache)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert not list((fake.bin.parent / "runs").glob("*"))


def test_a_hanging_controller_is_given_up(fake: Fake, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.answer("scontrol", "exec sleep 60")
    monkeypatch.setattr(scheduler, "COMMAND_TIMEOUT", 0.5)
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    with pytest.raises(UserError, match="scontrol did not answer within"):
        scheduler.Scheduler("SLURM").check_enough_hosts(1, "")


@pytest.mark.parametrize(
    ("launch", "remove", "message"),
    [
        ("slurm", "sbatch", "sbatch is not installed here"),
        ("slurm", "conf", "SLURM is not configured here"),
        ("elsewhere", "", "LAUNCH=elsewhere is unknown"),
    ],
)
def test_launch_slurm_never_runs_here(fake: Fake, cache: Path, launch: str, remove: str, message: str) -> None:
    if remove == "sbatch":
        (fake.bin / "sbatch").unlink()
    if remove == "conf":
        fake.conf.unlink()
    extra = {"PATH": f"{fake.bin}:{Path(sys.executable).parent}"} if remove == "sbatch" else {}
    done = submit_here(fake, cache, f"--launch={launch}", **extra)
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize(
    ("answers", "state", "exit_status"),
    [
        ({"squeue": "echo '4711|PENDING|Resources'"}, "PENDING", 0),
        ({"squeue": "echo '4711|RUNNING|None'"}, "RUNNING", 0),
        ({"squeue": "echo '47|PENDING|None'"}, "RUNNING", 0),  # another one; scontrol knows ours
        ({"squeue": "exit 1", "scontrol": "echo JobId=1 JobState=RUNNING"}, "RUNNING", 0),
        ({"squeue": "true", "scontrol": "exit 1", "sacct": "echo FAILED"}, "FAILED", 1),
        ({"squeue": "true", "scontrol": "exit 1", "sacct": "echo 'CANCELLED by 0'"}, "CANCELLED", 0),
        ({"squeue": "true", "scontrol": "exit 1", "sacct": "echo COMPLETED"}, "LOST", 1),
        ({"squeue": "true", "scontrol": "exit 1", "sacct": "exit 1"}, "LOST", 1),
        ({"squeue": "exit 1", "scontrol": "exit 1", "sacct": "exit 1"}, "UNKNOWN", 0),
    ],
)
def test_status_asks_in_turn(fake: Fake, answers: dict[str, str], state: str, exit_status: int) -> None:
    folder = waiting(fake.bin.parent / "runs", 0, "4711")
    for name, body in answers.items():
        fake.answer(name, body)
    done = report(fake, "status", "--wait=0", str(folder.path))
    assert re.search(rf"  {state}  ", done.stdout), done.stdout + done.stderr
    assert state != "PENDING" or done.stdout.endswith("  job 4711 Resources\n")
    assert done.returncode == exit_status


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ("JobState=TIMEOUT", "job_time_limit"),
        ("JobState=NODE_FAIL", "host_failed"),
        ("JobState=OUT_OF_MEMORY", "job_out_of_memory"),
        ("JobState=FAILED Reason=JobLaunchFailure BatchHost=TIMEOUT", "other"),
    ],
)
def test_the_state_of_a_job_is_the_cause_and_not_the_text_about_it(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, fields: str, cause: str
) -> None:
    folder = waiting(fake.bin.parent / "runs", 0, "4711")
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    monkeypatch.setattr(scheduler, "QUEUE_CACHE", {})
    fake.answer("squeue", "true")
    fake.answer("scontrol", f"echo {fields}")
    assert diagnosis.collect_diagnosis(folder)["cause_kind"] == cause


@pytest.mark.parametrize(
    ("exit_code", "expected"), [("0:9", 128 + 9), ("3:0", 3), ("0:0", 1), ("1:15", 1), ("0:53", 1)]
)
def test_the_exit_status_of_a_job_without_a_result_is_what_slurm_saw(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, exit_code: str, expected: int
) -> None:
    folder = waiting(fake.bin.parent / "runs", 0, "17")
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    fake.answer("scontrol", f'echo "JobId=17 JobState=FAILED ExitCode={exit_code} DerivedExitCode=0:0"')
    assert logs.find_exit_status(folder) == expected
    fake.answer("scontrol", "exit 1")
    fake.answer("sacct", f"echo {exit_code}")
    assert logs.find_exit_status(folder) == expected


def test_each_task_of_an_array_finds_its_own_run(tmp_path: Path) -> None:
    runs = [tmp_path / "runs" / f"run {letter}" for letter in "abc"]
    tasks = tmp_path / "tasks's.txt"
    tasks.write_text("".join(f"{run}\n" for run in runs))
    asked = sbatch.make_submitit_parameters(Profile(), "mnist_pipeline", 1, 2, tmp_path, tasks)
    (line,) = (line for line in asked["setup"] if line.startswith("RUN="))
    for number, run in enumerate(runs):
        script = f'{line}\nprintf %s "$RUN"'
        env = {"SLURM_ARRAY_TASK_ID": str(number), "PATH": os.environ["PATH"]}
        done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True)
        assert done.stdout == str(run)


def waiting(folder: Path, number: int, job: str) -> RunFolder:
    """A run that a job was submitted for."""
    found = Made(number=number, steps=0, state="lost").write(folder)
    write_json(found.path / "meta.json", {"job": {"id": job, "scheduler": "SLURM"}})
    return found


def test_the_queue_is_asked_once_for_all_runs(fake: Fake) -> None:
    runs = fake.bin.parent / "runs"
    for number, job in enumerate(("1", "2_0", "2_1", "3")):
        waiting(runs, number, job)
    fake.answer("squeue", "printf '1|RUNNING|None\\n2_0|RUNNING|None\\n2_1|PENDING|JobArrayTaskLimit\\n'")
    fake.answer("scontrol", "echo JobState=FAILED")
    done = report(fake, "status", f"--runs-folder={runs}")
    states = [line.split()[1:2] + line.split()[6:] for line in done.stdout.splitlines()[1:]]
    assert [state for state, *_ in states] == ["FAILED", "PENDING", "RUNNING", "RUNNING"], done.stdout + done.stderr
    assert "job 2_1 JobArrayTaskLimit" in done.stdout
    asked = [line.split()[0] for line in fake.calls.read_text().splitlines()]
    assert asked == ["squeue", "scontrol"]


def test_a_controller_that_hangs_is_waited_for_once(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [waiting(tmp_path / "runs", number, str(number)) for number in range(5)]
    for name in ("squeue", "scontrol", "sacct"):
        fake.answer(name, "exec sleep 60")
    monkeypatch.setattr(scheduler, "COMMAND_TIMEOUT", 3.3)
    monkeypatch.setattr(scheduler, "FAILURE_CACHE", {})
    monkeypatch.setattr(scheduler, "QUEUE_CACHE", {})
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    assert {status.read_state(run)[0] for run in runs} == {"UNKNOWN"}
    asked = [line.split()[0] for line in fake.calls.read_text().splitlines()]
    assert asked == ["squeue", "sacct"], "scontrol asks the same controller as squeue"
    monkeypatch.setattr(scheduler, "COOLDOWN_SECONDS", 0.0)
    fake.answer("squeue", "echo '3|RUNNING|None'")
    assert status.read_state(runs[3])[0] == "RUNNING"


def test_a_slow_controller_is_waited_for(fake: Fake) -> None:
    waiting(fake.bin.parent / "runs", 0, "1")
    fake.answer("squeue", "sleep 2.5; echo '1|RUNNING|None'")
    done = report(fake, "status", f"--runs-folder={fake.bin.parent / 'runs'}")
    assert " RUNNING " in done.stdout, done.stdout


def test_a_controller_that_is_down_is_not_waited_for(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM's commands try for ten seconds to reach a controller that refuses them."""
    folder = waiting(fake.bin.parent / "runs", 0, "1")
    fake.answer("squeue", "exec sleep 60")
    fake.answer("scontrol", 'echo "Slurmctld(primary) at ctl is DOWN"; exit 1')
    fake.answer("sacct", "exec sleep 60")
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    monkeypatch.setattr(scheduler, "FAILURE_CACHE", {})
    monkeypatch.setattr(scheduler, "QUEUE_CACHE", {})
    began = time.monotonic()
    state, detail = status.read_state(folder, timeout=scheduler.STATUS_TIMEOUT)
    assert state == "UNKNOWN" and detail == "SLURM: the controller is down"
    assert time.monotonic() - began < scheduler.STATUS_TIMEOUT, "about 2 s"


def test_a_run_of_which_nothing_is_known_is_not_over(fake: Fake) -> None:
    folder = waiting(fake.bin.parent / "runs", 0, "1")
    (folder.path / "wandb" / "offline-run-1").mkdir(parents=True)
    (folder.path / "wandb" / "offline-run-1" / "run.wandb").touch()
    for name in ("squeue", "scontrol", "sacct"):
        fake.answer(name, "exit 1")
    sync = ("sync", f"--runs-folder={folder.path.parent}", "--dry-run=1")
    skipped = report(fake, *sync).stdout
    assert f"skipped {folder.path.name}: it is not known whether the run has ended (SLURM: " in skipped
    assert "); run make sync again when SLURM answers\nnothing to send" in skipped
    for words in (["rerun", "--", str(folder.path)], ["exp", f"--resume={folder.path}"]):
        done = report(fake, *words)
        assert done.returncode == 2 and f"{folder.path.name} is UNKNOWN; " in done.stderr, done.stderr
    fake.answer("sacct", "echo FAILED")
    assert report(fake, *sync).stdout == f"{folder.path}/wandb/offline-run-1\n"


def test_the_result_file_is_asked_first_and_cancel_is_remembered(fake: Fake) -> None:
    folder = str(waiting(fake.bin.parent / "runs", 0, "4711").path)
    done = report(fake, "cancel", folder)
    assert done.stdout == "canceled job 4711\n"
    assert "scancel 4711" in fake.calls.read_text()
    assert "CANCELLED" in report(fake, "status", folder).stdout
    assert "is already CANCELLED" in report(fake, "cancel", folder).stdout


@pytest.mark.parametrize("words", [["status", "../x"], ["logs", "nothing"], ["cancel", "x"]])
def test_unknown_runs_are_refused(fake: Fake, words: list[str]) -> None:
    done = inside.run_verb(*words, **fake.environment())  # type: ignore[arg-type]
    assert done.returncode == 2 and "no such run folder" in done.stderr


def test_the_end_of_an_id_will_do(fake: Fake) -> None:
    path = waiting(fake.bin.parent / "runs", 0, "4711").path
    done = report(fake, "status", "--runs-folder", str(path.parent), path.name[-4:])
    assert path.name in done.stdout, done.stderr


def test_only_the_process_of_the_run_is_ended(tmp_path: Path) -> None:
    """A pid that has passed to another process is not signalled."""
    folder = RunFolder(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as sleep:
        process = Process.identify(sleep.pid)
        for started, state in ((process.start - 1, "LOST"), (process.start, "RUNNING")):
            entry = {"host": socket.gethostname(), "pid": sleep.pid, "pid_started": started}
            write_json(tmp_path / "meta.json", {"history": [entry]})
            assert status.read_state(folder)[0] == state
            answer = cancel.cancel_run(folder)
            if state == "LOST":
                assert "is already LOST" in answer and sleep.poll() is None
        assert sleep.wait(timeout=5) == -signal.SIGTERM


def test_runs_are_listed_within_seconds_when_the_controller_is_dead(fake: Fake, tmp_path: Path) -> None:
    for number in range(5):
        waiting(tmp_path / "runs", number, str(number))
    for name in ("squeue", "scontrol", "sacct"):
        fake.answer(name, "exec sleep 60")
    began = time.monotonic()
    done = report(fake, "status", f"--runs-folder={tmp_path / 'runs'}")
    assert done.returncode == 0 and done.stdout.count("UNKNOWN") == 5, done.stdout + done.stderr
    assert time.monotonic() - began < 30, "far less than one patience of 15 s for each run"
    asked = [" ".join(line.split()[:2]) for line in fake.calls.read_text().splitlines()]
    assert asked == ["squeue -h", "scontrol ping", "sacct -n"], "each once for all runs"


def test_a_run_whose_host_was_renamed_is_not_running_for_ever(tmp_path: Path) -> None:
    folder = Made(steps=10, state="running").write(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as sleep:
        process = Process.identify(sleep.pid)
        known = {"host": "before", "boot": provenance.read_boot_id(), "pid": sleep.pid, "pid_started": process.start}
        write_json(folder.path / "meta.json", {"history": [known]})
        old = time.time() - 100_000
        for path in folder.path.rglob("*"):
            os.utime(path, (old, old))
        assert status.read_state(folder) == ("RUNNING", ""), "its process is seen, under another name of the host"
        sleep.kill()
    write_note(folder.list_attempts()[0], TrackingNote())  # as `make sync` does
    state, detail = status.read_state(folder)
    assert state == "LOST" and "no sign of life for 28 h" in detail and "on before is not visible" in detail
    folder.list_attempts()[0].write_heartbeat(0, 10, time.time())
    assert status.read_state(folder)[0] == "RUNNING", "it may run on another host"
    write_json(folder.path / "meta.json", {"history": [known | {"boot": "another", "pid": os.getpid()}]})
    with pytest.raises(UserError, match="is running on before; run make cancel there"):
        cancel.cancel_run(folder)


def test_a_folder_that_was_prepared_and_never_begun_is_lost(fake: Fake, cache: Path) -> None:
    """Once its submitter is gone; until then it is being prepared."""
    fake.answer("sbatch", "kill -9 $PPID")  # of the submitter: nothing is cleared away
    assert submit(fake, cache).returncode == -signal.SIGKILL
    folder = the_folder(fake)
    assert not folder.list_attempts() and not json.loads((folder.path / "meta.json").read_text()).get("job")
    done = report(fake, "status", str(folder.path))
    assert "LOST" in done.stdout and "created but never started" in done.stdout, done.stdout
    assert "is already LOST" in report(fake, "cancel", str(folder.path)).stdout
    provenance.write_metadata(folder, [], {})  # as a living submitter, this process
    assert status.read_state(folder) == ("PENDING", "being prepared")
    done = report(fake, "cancel", str(folder.path))
    assert done.returncode == 2 and "is still being prepared" in done.stderr and "Traceback" not in done.stderr
    (folder.path / "meta.json").unlink()  # the first thing that is written is config.yaml
    assert status.read_state(folder)[0] == "PENDING"
    long_ago = (folder.path / "config.yaml").stat().st_mtime - 2 * status.PREPARATION_SECONDS
    os.utime(folder.path / "config.yaml", (long_ago, long_ago))
    assert status.read_state(folder)[0] == "LOST"


@pytest.mark.parametrize(
    ("result", "state", "detail"),
    [
        ({"scores": {"test_accuracy": 0.5}}, "FAILED", "result.json does not contain a known state"),
        ({"state": None, "exit_status": None}, "FAILED", "result.json does not contain a known state"),
        ({"state": "finished", "scores": {"test_accuracy": None}, "timings": None}, "FINISHED", ""),
        ({"state": "failed", "scores": {"test_accuracy": "x"}, "reason": None, "timings": "x"}, "FAILED", ""),
        ({"state": "finished", "scores": {"test_accuracy": 0.5}}, "FINISHED", "accuracy 50.00%"),
    ],
)
def test_a_result_without_its_numbers_hides_no_other_run(
    tmp_path: Path, result: dict[str, Any], state: str, detail: str
) -> None:
    folder = Made(steps=10).write(tmp_path)
    write_json(folder.path / "result.json", result)
    found = status.read_status(folder)
    assert (found.state, found.detail) == (state, detail) and found.format_line()
    assert logs.find_exit_status(folder) == 1


def test_a_start_is_recorded_so_that_its_process_is_known_again(tmp_path: Path) -> None:
    provenance.record_attempt_start(RunFolder(tmp_path, 1))
    (entry,) = json.loads((tmp_path / "meta.json").read_text())["history"]
    assert Process(entry["pid"], entry["pid_started"]) == Process.identify(os.getpid())


def test_a_damaged_result_is_told(fake: Fake, tmp_path: Path) -> None:
    folder = Made(steps=20, state="lost").write(tmp_path / "runs")
    (folder.path / "result.json").write_text('{"state": "fini')
    state, detail = status.read_state(folder)
    assert state == "LOST" and detail.startswith("result.json is damaged; "), detail


def test_a_run_folder_without_settings_is_named(fake: Fake, tmp_path: Path) -> None:
    sound = Made(number=1, steps=20).write(tmp_path / "runs")
    broken = Made(number=2, steps=20).write(tmp_path / "runs")
    (broken.path / "config.yaml").unlink()
    (tmp_path / "runs" / "sweeps").mkdir()
    done = report(fake, "status", f"--runs-folder={tmp_path / 'runs'}")
    assert sound.path.name in done.stdout and broken.path.name not in done.stdout
    assert done.stderr == f"not listed because config.yaml is missing: {broken.path.name}\n"


def test_a_run_of_another_source_is_neither_submitted_nor_given_settings_that_it_lacks(tmp_path: Path) -> None:
    folder = Made(steps=20).write(tmp_path)
    text = (folder.path / "config.yaml").read_text()
    with pytest.raises(UserError, match="was created by another version of this project"):
        submit_prepared_run(folder, mnist_pipeline.Config(), text, Profile(), scheduler.Scheduler("SLURM"))
    assert not (folder.path / "submit").exists()
    (folder.path / "config.yaml").write_text("epochs: 1\n")
    with pytest.raises(UserError, match=r"has no setting wandb.model; remove it from ARGS"):
        check_source_knows_settings(folder, ["epochs=2", "wandb.model=false"])
