"""Submission of a run to SLURM: what the job needs, and what is refused before sbatch is called."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import config, custom_code
from common.config.yaml_values import flatten_mapping
from common.data import prepare
from common.runs import provenance
from common.runs.folder import RunFolder
from common.system.errors import UserError
from common.techniques.pipeline.custom_schedules import check_schedule_of_config
from common.training import custom_optimizer, custom_training
from common.training.attempt import prepare_data_of_run
from configs import ddp_multinode, mnist_pipeline, resnet_modelparallel
from configs.profile import Profile
from slurm.__main__ import main as slurm_main
from slurm.launch.submit import check_source_knows_settings, prepare_run_folder, submit_prepared_run
from slurm.scheduling import scheduler
from tests.harness.commands import in_process_calls
from tests.harness.commands.exit_status import Completed
from tests.harness.custom_code.examples import write_example, write_schedule
from tests.harness.repository import ROOT
from tests.harness.runs.synthetic_runs import SyntheticRun
from tests.harness.slurm.fake_slurm import FakeSlurm, call_main, call_slurm, execute_module


def list_arguments(cache: Path, runs: Path, *options: str) -> tuple[str, ...]:
    """Return the arguments that submit a short run."""
    settings = f"data.name=digits data.cache={cache} runs={runs}"
    return ("exp", f"--args={settings}", *options, "--", "mnist_pipeline")


def find_only_run(runs: Path) -> RunFolder:
    (path,) = runs.iterdir()
    return RunFolder(path)


def test_the_folder_of_a_submitted_run_contains_all_that_the_job_needs(
    fake: FakeSlurm, cache: Path, runs: Path
) -> None:
    process = execute_module(fake, "slurm", *list_arguments(cache, runs, "--nodes=2"))
    assert "job 4711 on SLURM, 2 nodes, 2 ranks" in process.stdout
    assert "make logs RUN=" in process.stdout
    assert "make cancel RUN=" in process.stdout

    folder = find_only_run(runs)
    assert (folder.path / "code" / "experiments" / "mnist_pipeline.py").exists()
    assert "#SBATCH --nodes=2" in (folder.path / "submit" / "job.sh").read_text()
    metadata = json.loads((folder.path / "meta.json").read_text())
    assert metadata["job"]["id"] == "4711"
    assert metadata["data"]["name"] == "digits"
    assert not folder.list_attempts(), "the job claims the attempt"
    assert re.search(r"nodes: 2", (folder.path / "config.yaml").read_text())


def test_the_cluster_of_a_job_is_recorded(fake: FakeSlurm, cache: Path, runs: Path) -> None:
    fake.define_command("scontrol", "echo 'Slurmctld(primary) at ctl is UP'; echo 'ClusterName = first'")
    call_slurm(fake, *list_arguments(cache, runs))
    assert provenance.read_metadata(find_only_run(runs))["job"]["cluster"] == "first"


def test_a_job_uses_copies_of_custom_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data_set = write_example(tmp_path)
    schedule = write_schedule(tmp_path)
    optimizer = write_example(tmp_path, "lion.py")
    decay = write_example(tmp_path, "halving.py")
    settings = [
        f"data.name={data_set.name}:load",
        f"schedule={schedule.name}:own",
        f"optim.name={optimizer.name}:Lion",
        f"optim.decay={decay.name}:halve",
        "data.cache=sets",
        "runs=mine",
    ]
    folder = prepare_run_folder("mnist_pipeline", config.load_config(mnist_pipeline.Config, settings, {}), None, set())
    assert (folder.path / "code" / "own" / "data.py").read_text() == data_set.read_text()

    monkeypatch.chdir("/")  # the job may start in another folder
    cfg = config.load_config(mnist_pipeline.Config, ["--resume", str(folder.path)], {})
    custom_code.check_custom_settings(cfg, folder.path / "code")
    with pytest.raises(UserError, match=r"name an existing FILE\.py:function, or use one of naive, gpipe, 1f1b"):
        check_schedule_of_config(cfg)
    with pytest.raises(UserError, match=r"name an existing FILE\.py:Class, or use one of sgd, adam, adamw, lars, lamb"):
        custom_optimizer.check_custom_optimizer(cfg.optim)
    prepared = prepare.prepare_dataset(cfg.data, code=folder.path / "code")
    assert prepared.name == "shapes.py:load"
    assert prepared.path.parent == tmp_path / "sets"


def test_a_job_uses_copies_of_a_custom_network_and_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("shapes.py", "residual.py", "focal.py"):
        write_example(tmp_path, name)
    settings = ["data.name=shapes.py:load", "model=residual.py:ResidualNet", "data.cache=sets", "runs=mine"]
    cfg = config.load_config(ddp_multinode.Config, [*settings, "loss=focal.py:focal_loss"], {})
    folder = prepare_run_folder("ddp_multinode", cfg, None, set())
    monkeypatch.chdir("/")  # the job may start in another folder
    cfg = config.load_config(ddp_multinode.Config, ["--resume", str(folder.path)], {})
    custom_code.check_custom_settings(cfg, folder.path / "code")
    with pytest.raises(UserError, match=r"model=residual\.py:ResidualNet: there is no file /residual\.py"):
        custom_training.check_files_of_config(cfg)
    prepare.prepare_dataset_of_config(cfg, fallback=False, code=folder.path / "code")

    monkeypatch.chdir(tmp_path)
    cfg = config.load_config(ddp_multinode.Config, [*settings, "loss=mse"], {})
    with pytest.raises(UserError, match="loss=mse needs float targets"):
        prepare_run_folder("ddp_multinode", cfg, None, set())
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [folder.path.name]


GENERATED_IMAGES = ["data.samples=64", "data.image_size=8"]


def test_all_paths_of_a_job_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [*GENERATED_IMAGES, "weights=start.pt", "data.root=raw", "data.cache=sets", "runs=mine"]
    cfg = config.load_config(resnet_modelparallel.Config, settings, {})
    folder = prepare_run_folder("resnet_modelparallel", cfg, None, set())
    assert folder.path.parent == tmp_path / "mine"
    written = flatten_mapping(config.read_config_file(folder.path / "config.yaml"))
    assert written["weights"] == str(tmp_path / "start.pt")
    assert written["data.root"] == str(tmp_path / "raw")
    assert written["data.cache"] == str(tmp_path / "sets")
    assert written["runs"] == str(tmp_path / "mine")


def test_a_notice_is_printed_once_for_all_runs_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(provenance, "copy_source", lambda folder: None)  # to save time
    printed_notices: set[str] = set()
    cfg = config.load_config(resnet_modelparallel.Config, GENERATED_IMAGES, {})
    for _ in range(2):
        folder = prepare_run_folder("resnet_modelparallel", cfg, None, printed_notices)
    assert capsys.readouterr().out.count("generated images: ") == 1
    assert config.read_config_file(folder.path / "config.yaml")["weights"] == "none"


def test_a_job_uses_the_data_set_that_was_found_when_it_was_submitted(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_ROOT", str(tmp_path))  # without MNIST
    settings = [f"data.cache={cache}", f"runs={tmp_path / 'runs'}", "data.download_timeout=0"]
    folder = prepare_run_folder("mnist_pipeline", config.load_config(mnist_pipeline.Config, settings), None, set())
    cfg = config.build_config(mnist_pipeline.Config, [config.read_config_file(folder.path / "config.yaml")])
    assert cfg.data.name == "mnist"
    assert config.find_changes(folder.path, cfg) == {}
    assert config.read_settings(folder.path)["data.name"] == "digits"
    assert prepare_data_of_run(cfg, folder).name == "digits"

    resolved = folder.path / "resolved.yaml"
    resolved.unlink()
    with pytest.raises(UserError, match=r"was trained on data\.name=digits, but its resolved\.yaml no longer contains"):
        prepare_data_of_run(cfg, folder)
    resolved.write_text("data.name: digits\n")  # as the message recommends
    assert prepare_data_of_run(cfg, folder).name == "digits"


@pytest.mark.slow
def test_uncommitted_files_belong_to_the_run_and_are_refused_if_strict(
    fake: FakeSlurm, cache: Path, runs: Path
) -> None:
    provenance.copy_source(RunFolder(runs.parent))  # a separate checkout, because other tests copy ROOT meanwhile
    checkout = runs.parent / "code"
    for arguments in ("init -q", "add -A", "-c user.name=x -c user.email=x@x commit -qm x"):
        subprocess.run(["git", "-C", str(checkout), *arguments.split()], check=True)

    def submit(*options: str, status: int = 0) -> Completed:
        return execute_module(fake, "slurm", *list_arguments(cache, runs, *options), source=checkout, status=status)

    submit("--strict=1", "--dry-run=1")
    (checkout / "common" / "brand_new_file.py").write_text("x = 1\n")
    submit()
    assert "STRICT=1" in submit("--strict=1", status=2).stderr
    assert (find_only_run(runs).path / "code" / "common" / "brand_new_file.py").exists()


def test_a_dry_run_prints_the_job_and_changes_nothing(fake: FakeSlurm, cache: Path, runs: Path) -> None:
    process = call_slurm(fake, *list_arguments(cache, runs, "--dry-run=1", "--nodes=2"))
    assert "#SBATCH --nodes=2" in process.stdout
    assert "not using SLURM" not in process.stdout
    assert "microbatches: 4" in process.stdout
    process = call_slurm(fake, *list_arguments(cache, runs, "--dry-run=1", "--launch=local"))
    assert "not using SLURM: without DRY_RUN=1, this command runs on this machine and submits no job" in process.stdout
    assert not fake.calls_file.exists()
    assert not runs.exists()


def test_a_dry_run_of_a_resumed_run_shows_its_folder(fake: FakeSlurm, tmp_path: Path) -> None:
    folder = SyntheticRun("mnist_pipeline", 0, 20, state="failed").write(tmp_path)
    provenance.copy_source(folder)
    process = call_slurm(fake, "exp", "--dry-run=1", f"--resume={folder.path}", "--", "")
    assert f"#SBATCH --output={folder.path}/" in process.stdout
    assert "<time>-<id>" not in process.stdout


def run_exp(fake: FakeSlurm, settings: str, *options: str, status: int = 0) -> Completed:
    """Call `exp` of data parallelism within this process."""
    arguments = (f"--args={settings}", *options, "--", "ddp_multinode")
    return in_process_calls.call_verb("exp", *arguments, cwd=ROOT, status=status, **fake.make_environment())


def test_a_dry_run_prints_the_number_of_ranks_of_the_job(fake: FakeSlurm) -> None:
    for settings, ranks in (("cluster.gpus=4", 4), ("processes_per_node=2", 2), ("", 1)):
        process = run_exp(fake, settings, "--dry-run=1")
        assert f"#SBATCH --ntasks-per-node={ranks}\n" in process.stdout, process.stderr
        assert f"processes_per_node: {ranks}\n" in process.stdout


@pytest.mark.parametrize("dry_run", ["0", "1"])
def test_settings_that_do_not_fit_the_number_of_ranks_are_refused(fake: FakeSlurm, runs: Path, dry_run: str) -> None:
    options = (f"--dry-run={dry_run}", "--launch=slurm")
    for settings, message in (("elastic=true", "requires at least two ranks"), ("batch=66 cluster.gpus=4", "batch=66")):
        assert message in run_exp(fake, f"{settings} runs={runs}", *options, status=2).stderr
    assert not runs.exists()


SLURM_ERRORS = [
    ("scontrol", "echo 'Slurmctld(primary) at ctl is DOWN'", "the controller does not answer"),
    (
        "scontrol",
        "printf 'Slurmctld(primary) at ctl is DOWN\\n*****\\n** RESTORE IT **\\n*****\\n'; exit 1",
        "SLURM: the controller does not answer (Slurmctld(primary) at ctl is DOWN); try later",
    ),
    ("scontrol", "echo 'slurm_load: Unable to contact controller' >&2; exit 1", "Unable to contact"),
    ("sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1", "invalid partition specified: x"),
    ("sbatch", "echo 'sbatch: error: More processors requested than permitted' >&2; exit 1", "More processors"),
    ("sbatch", "echo 'use the partition long'; exit 1", "SLURM rejected the job: use the partition long"),
    ("sbatch", "exit 3", "SLURM rejected the job: sbatch ended with status 3"),
    ("sbatch", "echo accepted", "the output of sbatch has no job id ("),
]


@pytest.mark.parametrize("name, body, message", SLURM_ERRORS)
def test_errors_of_slurm_are_reported_and_leave_no_folder(
    fake: FakeSlurm, cache: Path, runs: Path, name: str, body: str, message: str
) -> None:
    fake.define_command(name, body)
    process = call_slurm(fake, *list_arguments(cache, runs), status=2)
    assert process.stderr.startswith("error: ")
    assert message in process.stderr
    assert not list(runs.glob("*"))


def test_the_folder_of_a_job_that_cannot_be_recorded_is_kept(
    fake: FakeSlurm, cache: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UserError("the disk is full")

    monkeypatch.setattr(provenance, "update_metadata", refuse)
    process = call_slurm(fake, *list_arguments(cache, runs), status=2)
    message = "job 4711 was submitted but not recorded: the disk is full; to cancel the job, run scancel 4711"
    assert process.stderr == f"error: {message}\n"
    assert (find_only_run(runs).path / "submit" / "job.sh").exists()


def test_ctrl_c_while_a_job_is_submitted_is_ignored(fake: FakeSlurm, cache: Path, runs: Path) -> None:
    fake.define_command("sbatch", "kill -INT $PPID $$; echo 'Submitted batch job 4711'")
    handler = signal.getsignal(signal.SIGINT)
    process = call_slurm(fake, *list_arguments(cache, runs))
    assert "job 4711 on SLURM" in process.stdout
    assert provenance.read_metadata(find_only_run(runs))["job"]["id"] == "4711"
    assert signal.getsignal(signal.SIGINT) == handler


def test_launch_slurm_requires_sbatch(fake: FakeSlurm, cache: Path, runs: Path) -> None:
    (fake.bin_folder / "sbatch").unlink()
    path = f"{fake.bin_folder}:{Path(sys.executable).parent}"
    arguments = list_arguments(cache, runs, "--launch=slurm")
    process = call_main(fake, slurm_main, *arguments, PATH=path, status=2)
    assert "sbatch is not installed here" in process.stderr


def test_launch_slurm_requires_its_configuration(fake: FakeSlurm, cache: Path, runs: Path) -> None:
    fake.slurm_conf.unlink()
    process = call_slurm(fake, *list_arguments(cache, runs, "--launch=slurm"), status=2)
    assert "SLURM is not configured here" in process.stderr


def test_slurm_that_is_installed_from_source_is_found(fake: FakeSlurm, cache: Path, runs: Path) -> None:
    fake.slurm_conf.unlink()
    arguments = list_arguments(cache, runs)
    configuration = fake.bin_folder.parent / "etc" / "slurm.conf"
    configuration.parent.mkdir()
    configuration.touch()
    environ = fake.make_environment()
    del environ["SLURM_CONF"]
    completed = in_process_calls.call_main(slurm_main, *arguments, cwd=ROOT, status=0, **environ)
    assert "job 4711 on SLURM" in completed.stdout


def test_an_unknown_launch_is_refused(fake: FakeSlurm, cache: Path, runs: Path) -> None:
    process = call_slurm(fake, *list_arguments(cache, runs, "--launch=elsewhere"), status=2)
    assert "LAUNCH=elsewhere is unknown" in process.stderr


def test_a_run_of_another_version_of_the_source_is_not_submitted(tmp_path: Path) -> None:
    folder = SyntheticRun(steps=20).write(tmp_path)
    text = (folder.path / "config.yaml").read_text()
    with pytest.raises(UserError, match="was created by another version of this project"):
        submit_prepared_run(
            folder, mnist_pipeline.Config(), text, Profile(), scheduler.Scheduler("SLURM"), is_new=False
        )
    assert not (folder.path / "submit").exists()


def test_settings_that_the_source_of_a_run_lacks_are_refused(tmp_path: Path) -> None:
    folder = SyntheticRun(steps=20).write(tmp_path)
    (folder.path / "config.yaml").write_text("epochs: 1\nelastic:\n  on: false\n")
    with pytest.raises(UserError, match=r"has no setting wandb.model; remove it from ARGS"):
        check_source_knows_settings(folder, ["epochs=2", "wandb.model=false"])
    check_source_knows_settings(folder, ["elastic=true"])
