"""Record a run's source code, package versions, machine and attempts. This module imports neither torch nor wandb."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Container
from pathlib import Path
from typing import Any

from common.config.config import ROOT
from common.config.custom_code import list_custom_settings
from common.config.custom_function import locate_file_copy
from common.runs.folder import RunFolder, convert_disk_errors, read_json, write_atomic, write_json
from common.system.processes import Process
from common.system.text import read_text_or_empty
from configs.shared import Launch

PACKAGES = ("torch", "torchvision", "numpy", "pillow", "wandb", "submitit", "omegaconf", "rich")
SOURCE_FOLDERS = ("experiments", "common", "slurm", "configs")  # files in the repository root are also copied
PICTURE_SUFFIXES = (".svg", ".png")  # figures in the documentation, which are not copied
CHECKSUMS = "SHA256SUMS"  # file in a run's code/, in the format of the command sha256sum
GROUPS = ("git", "packages", "machine", "data", "prepared_by", "world", "job")
ENTRY_TYPES: dict[str, type] = dict.fromkeys(GROUPS, dict) | {"argv": list, "history": list}
"""Expected types of the entries of meta.json that are dicts or lists."""
JOB_TYPES: dict[str, Any] = {
    "id": str,
    "scheduler": str,
    "cluster": str | None,
    "logs": str | None,
    "profile": dict | None,
}
METADATA_FORMAT = 2  # format of meta.json


def format_utc_now() -> str:
    """Return the current time in UTC as an ISO 8601 string, rounded down to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def parse_utc_time(text: Any) -> float:
    """Return a time that `format_utc_now` has formatted, in seconds since 1970, or 0 if the text is not a time."""
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return 0.0


def run_git(*arguments: str) -> str | None:
    """Run a git command in the source tree and return its output. Bytes that are not UTF-8 are replaced.

    Returns None if the command fails, for example if git is not installed or the source tree is not a checkout.
    """
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        completed = subprocess.run(
            command, check=False, capture_output=True, encoding="utf-8", errors="replace", timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout if completed.returncode == 0 else None


def is_hidden(path: Path) -> bool:
    """Return whether a file or one of its folders is hidden."""
    return any(part.startswith(".") for part in path.parts)


def list_source_files() -> list[Path]:
    """Return the paths of all source files relative to the repository root, including untracked files.

    Figures, caches and files of runs are excluded. Without git, hidden files are also excluded.
    """
    git_files = run_git("ls-files", "-co", "--exclude-standard", "-z")
    if git_files:
        paths = [Path(name) for name in git_files.split("\0") if name]
        paths = [path for path in paths if len(path.parts) == 1 or path.parts[0] in SOURCE_FOLDERS]
    else:
        absolute_paths = list(ROOT.iterdir())
        for name in SOURCE_FOLDERS:
            absolute_paths += (ROOT / name).rglob("*")
        paths = [path.relative_to(ROOT) for path in absolute_paths if "__pycache__" not in path.parts]
        # Hidden files, which git may ignore, can contain secrets.
        paths = [path for path in paths if not is_hidden(path)]
    paths = [path for path in paths if (ROOT / path).is_file()]
    return [path for path in paths if path.suffix not in PICTURE_SUFFIXES and path.name != CHECKSUMS]


def read_package_version(package: str) -> str | None:
    """Return the installed version of a package, or None if the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_cpu_model() -> str | None:
    """Return the processor name that Linux reports, or None if Linux reports no name."""
    for line in read_text_or_empty("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return None


def describe_machine(device: str) -> str:
    """Describe the machine of a benchmark by its processor, cores and, if the device is cuda, its first GPU."""
    name = f"{read_cpu_model()}, {len(os.sched_getaffinity(0))} cores"
    if device == "cuda":
        import torch

        name += f", {torch.cuda.get_device_name()}"
    return name


def count_visible_gpus() -> int:
    """Return the number of GPUs that are visible to a child process.

    This function does not use CUDA, because a process that has used CUDA cannot fork.
    """
    if (read_package_version("torch") or "").endswith("+cpu"):  # this build cannot use GPUs
        return 0
    device_files = Path("/dev").glob("nvidia*")
    device_count = sum(path.name[6:].isdigit() for path in device_files)
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return device_count
    visible_count = 0
    for name in map(str.strip, mask.split(",")):
        if not name or name.startswith("-"):  # CUDA ignores this entry and all later entries
            break
        visible_count += 1
    return min(device_count, visible_count)


def uses_gpus(launch: Launch, ranks: int) -> bool:
    """Return whether any of the ranks of this host will use a GPU. With fewer GPUs than ranks, only mixed runs do."""
    gpus = 0 if launch.excludes_gpus else count_visible_gpus()
    return gpus >= (1 if launch.mixed else ranks)


def has_uncommitted_changes() -> bool | None:
    """Return whether the checkout has uncommitted changes, or None if there is no checkout."""
    status = run_git("status", "--porcelain")
    return bool(status) if status is not None else None


def copy_function_file(kind: str, value: str, code: Path, *, overwrite: bool = False) -> None:
    """Copy the file named in `FILE.py:function` to a run's `code/` folder if the copy does not exist.

    If `overwrite` is true, an existing copy is replaced. Values that do not name a file are ignored. Ranks that start
    at the same time see either the complete file or no file. Raises UserError if writing fails.
    """
    copy = locate_file_copy(kind, value, code)
    if ":" in value and (overwrite or not copy.is_file()):
        with convert_disk_errors(copy):
            copy.parent.mkdir(parents=True, exist_ok=True)
            draft = copy.with_suffix(".new")
            shutil.copyfile(value.rpartition(":")[0], draft)
            draft.replace(copy)


def copy_custom_files(settings: Any, code: Path, *, overwrite: Container[str] = ()) -> None:
    """Copy the files of all custom settings of a config into the source folder `code` of a run.

    An existing copy is replaced only if the key of its setting is in `overwrite`. Raises UserError if writing fails.
    """
    for setting in list_custom_settings(settings):
        copy_function_file(setting.kind, setting.value, code, overwrite=setting.key in overwrite)


def copy_source(folder: RunFolder) -> None:
    """Copy the source files to the run's `code/` folder and store their checksums there."""
    code = folder.path / "code"
    checksums = []
    with convert_disk_errors(code):
        for name in list_source_files():
            content = (ROOT / name).read_bytes()
            (code / name).parent.mkdir(parents=True, exist_ok=True)
            (code / name).write_bytes(content)
            checksums.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
    write_atomic(code / CHECKSUMS, "".join(checksums))


def write_metadata(folder: RunFolder, arguments: list[str], data: dict[str, Any]) -> None:
    """Write a run's git commit, package versions, machine, command line and data set to meta.json.

    Raises UserError if writing fails.
    """
    git = {
        "sha": (run_git("rev-parse", "HEAD") or "").strip() or None,
        "dirty": has_uncommitted_changes(),
        "diff": run_git("diff", "HEAD") or None,
    }
    machine = {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": read_cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
    }
    meta = {
        "format": METADATA_FORMAT,
        "git": git,
        "packages": {package: read_package_version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "machine": machine,
        "argv": [sys.executable, *arguments],
        "data": data,
        "prepared_by": identify_process(),
        "history": [],
    }
    write_json(folder.path / "meta.json", meta)


def read_metadata(folder: RunFolder) -> dict[str, Any]:
    """Return the content of meta.json without entries of unexpected types."""
    meta = dict[str, Any]()
    for name, content in read_json(folder.path / "meta.json").items():
        if content is None or isinstance(content, ENTRY_TYPES.get(name, object)):
            meta[name] = content
    meta["history"] = [attempt for attempt in meta.get("history") or [] if isinstance(attempt, dict)]
    job = meta.get("job")
    if job and not all(isinstance(job.get(name), kind) for name, kind in JOB_TYPES.items()):
        del meta["job"]
    data = meta.get("data")
    if data and not isinstance(data.get("sha256", {}), dict):
        del data["sha256"]
    return meta


def record_attempt_start(folder: RunFolder) -> None:
    """Add the attempt `folder.number` to the history in meta.json. Raises UserError if writing fails."""
    prefixes = ("SLURM_JOB", "SLURM_RESTART")
    slurm = {name: text for name, text in os.environ.items() if name.startswith(prefixes)}
    attempt = {"attempt": folder.number, "start": format_utc_now(), "end": None, "state": "running"}
    attempt |= identify_process()
    attempt |= {"slurm": slurm or None, "starter": identify_launcher()}
    meta = read_metadata(folder)
    meta["history"].append(attempt)
    write_json(folder.path / "meta.json", meta)


def identify_process() -> dict[str, Any]:
    """Return values that identify this process even after it has ended.

    The values are the host, boot id, pid namespace, pid and start time.
    """
    return {
        "host": socket.gethostname(),
        "boot": read_boot_id(),
        "pid_namespace": read_pid_namespace(),
        "pid": os.getpid(),
        "pid_started": Process.identify(os.getpid()).start,
    }


def read_boot_id() -> str:
    """Return the boot id of this host, which does not change if the host is renamed.

    Returns an empty string if the boot id is unknown.
    """
    return read_text_or_empty("/proc/sys/kernel/random/boot_id").strip()


def read_pid_namespace() -> str:
    """Return the pid namespace of this process. A container usually has a separate pid namespace.

    Returns an empty string if the namespace is unknown.
    """
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (the target of this link is not a path)
    except OSError:
        return ""


def read_job_id() -> str:
    """Return the id of the SLURM job of this process, or an empty string if the process belongs to no SLURM job.

    The id of a task of a job array has the form ARRAY_TASK, because SLURM_JOB_ID of one of the tasks equals the id of
    the array, and `scontrol requeue` and `scancel` apply that id to all tasks.
    """
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


def identify_launcher() -> str | None:
    """Return an id of the SLURM job or torchrun launch that started this process.

    In a SLURM job, the id always identifies the job. Returns None if neither SLURM nor torchrun started this process.
    """
    if job := read_job_id():
        return f"slurm {os.environ.get('SLURM_CLUSTER_NAME')} {job}"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        agent = Process.identify(os.getppid())
        return f"torchrun {os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {agent.pid} {agent.start}"
    return None


def find_run_of_same_launch(runs: Path, name: str, arguments: list[str]) -> RunFolder | None:
    """Return the run that an earlier attempt of the same SLURM job or torchrun launch created.

    The run must have been started with the same command-line `arguments`. Returns None if there is no such run.
    """
    launcher = identify_launcher()
    if launcher is None:
        return None
    for path in sorted(runs.glob(f"{name}-*/meta.json"), reverse=True):
        meta = read_metadata(RunFolder(path.parent))
        starters = [attempt.get("starter") for attempt in meta["history"][:1]]
        if starters == [launcher] and meta.get("argv", [])[1:] == arguments:
            return RunFolder(path.parent)
    return None


def update_metadata(folder: RunFolder, **facts: Any) -> None:
    """Add or replace entries of meta.json. Raises UserError if writing fails."""
    write_json(folder.path / "meta.json", read_metadata(folder) | facts)


def record_attempt_end(folder: RunFolder, state: str) -> None:
    """Add the final state and end time of the newest attempt to the history in meta.json.

    Raises UserError if writing fails.
    """
    meta = read_metadata(folder)
    if meta["history"]:
        meta["history"][-1] |= {"state": state, "end": format_utc_now()}
        write_json(folder.path / "meta.json", meta)


def format_new_run_command(folder: RunFolder) -> str:
    """Return the command for a new run after the user has fixed an error in the source code."""
    return f'make exp NAME={folder.experiment} ARGS="..."'


def describe_old_source(folder: RunFolder) -> str:
    """Return why resuming a run does not help after the user has fixed an error in the source code."""
    return f"RESUME= would use the old source in {folder.path}/code"
