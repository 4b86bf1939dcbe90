"""Provenance of a run: source, versions, machine, attempts. Imports neither torch nor W&B."""

from __future__ import annotations

import ast
import datetime
import hashlib
import importlib.metadata
import itertools
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from common.core.config import ROOT
from common.core.errors import UserError
from common.core.own_function import find_kept_file
from common.core.processes import Process
from common.core.text import read_or_empty
from common.runs.folder import Folder, disk_errors, read_json, write_atomic, write_json

PACKAGES = ("torch", "torchvision", "numpy", "pillow", "wandb", "submitit", "omegaconf", "rich")
SOURCE = ("experiments", "common", "slurm", "configs")  # and the files beside these folders
NO_SOURCE = (".svg", ".png")  # pictures of the pages
CHECKSUMS = "SHA256SUMS"  # in a run's code/, in the format of the program sha256sum
GROUPS = ("git", "packages", "machine", "data", "prepared_by", "world", "job")
METADATA: dict[str, type] = dict.fromkeys(GROUPS, dict) | {"argv": list, "history": list}
"""Types of the entries of meta.json that are no text or number."""


def format_utc_now() -> str:
    """Return the time in UTC, to the second, as ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def run_git(*arguments: str) -> str | None:
    """Return the output of a git command in the source tree; None without git or outside a checkout."""
    try:
        command = ["git", "-C", str(ROOT), *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def list_source_files() -> list[Path]:
    """Return the source files, new ones included, relative to the root; never what runs or caches left there."""
    listed = run_git("ls-files", "-co", "--exclude-standard", "-z")
    if listed:
        found = [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]
        found = [path for path in found if len(path.parts) == 1 or path.parts[0] in SOURCE]
    else:
        beside = [path for path in ROOT.iterdir() if path.is_file()]
        inside = [path for name in SOURCE for path in (ROOT / name).rglob("*") if path.is_file()]
        found = [path.relative_to(ROOT) for path in beside + inside if "__pycache__" not in path.parts]
    return [path for path in found if path.suffix not in NO_SOURCE and path.name != CHECKSUMS]


def read_package_version(package: str) -> str | None:
    """Return the installed version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_cpu_model() -> str | None:
    """Return the processor's name as Linux gives it; None where it gives none."""
    lines = read_or_empty("/proc/cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def describe_machine(device: str) -> str:
    """Return the kind of machine for measurements: processor, cores, and the first GPU where one is used."""
    name = f"{read_cpu_model()}, {len(os.sched_getaffinity(0))} cores"
    if device == "cuda":
        import torch

        name += f", {torch.cuda.get_device_name()}"
    return name


def count_visible_gpus() -> int:
    """Count the GPUs that a process started here would see, without CUDA: a parent that has used it cannot fork."""
    if (read_package_version("torch") or "").endswith("+cpu"):  # it has no use for those that are there
        return 0
    there = sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return there
    named = itertools.takewhile(lambda name: name and name[0] != "-", map(str.strip, mask.split(",")))
    return min(there, sum(1 for _ in named))  # CUDA looks no further than the first that is no device


def has_uncommitted_changes() -> bool | None:
    """Check the checkout for changes that are not committed; None outside a checkout."""
    status = run_git("status", "--porcelain")
    return bool(status) if status is not None else None


def keep_function_file(kind: str, value: str, code: Path, *, anew: bool = False) -> None:
    """Copy the file of `FILE.py:function` into a run's source, if it is not there yet, or `anew`. Raises UserError.

    Ranks that start meanwhile find it whole or not at all. Nothing is done for values that name no file.
    """
    kept = find_kept_file(kind, value, code)
    if ":" in value and (anew or not kept.is_file()):
        with disk_errors(kept):
            kept.parent.mkdir(parents=True, exist_ok=True)
            draft = kept.with_suffix(".new")
            shutil.copyfile(value.rpartition(":")[0], draft)
            draft.replace(kept)


def copy_source(folder: Folder) -> None:
    """Copy the source into `code/`, with the checksums of its files."""
    code = folder.path / "code"
    sums = []
    with disk_errors(code):
        for name in list_source_files():
            content = (ROOT / name).read_bytes()
            (code / name).parent.mkdir(parents=True, exist_ok=True)
            (code / name).write_bytes(content)
            sums.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
    write_atomic(code / CHECKSUMS, "".join(sums))


def check_source(folder: Folder) -> None:
    """Raise UserError where a file in a run's `code/` is missing or is not what was copied there.

    Of a run that is older than the checksums, files that Python cannot read are found.
    """
    code = folder.path / "code"
    damaged = []
    lines = read_or_empty(str(code / CHECKSUMS)).splitlines()
    for line in lines:
        digest, _, name = line.partition("  ")
        if not (code / name).is_file() or hashlib.sha256((code / name).read_bytes()).hexdigest() != digest:
            damaged.append(name)
    for path in code.rglob("*.py") if not lines else ():
        try:
            ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            damaged.append(str(path.relative_to(code)))
    if damaged:
        named = ", ".join(damaged[:5]) + (", ..." if len(damaged) > 5 else "")
        raise UserError(
            f"the run's source is damaged: {named} in {code}; bring the run's files back, or start a new run; "
            f"where they were changed on purpose, delete {code / CHECKSUMS}"
        )


def write_metadata(folder: Folder, arguments: list[str], data: dict[str, Any]) -> None:
    """Write meta.json: source, versions, machine, arguments and data of a run. Raises UserError."""
    meta = {
        "git": {
            "sha": (run_git("rev-parse", "HEAD") or "").strip() or None,
            "dirty": has_uncommitted_changes(),
            "diff": run_git("diff", "HEAD") or None,
        },
        "packages": {package: read_package_version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "machine": {"host": socket.gethostname(), "system": platform.platform(), "cpu": read_cpu_model()}
        | {"cores": len(os.sched_getaffinity(0))},
        "argv": [sys.executable, *arguments],
        "data": data,
        "prepared_by": identify_process(),
        "history": [],
    }
    write_json(folder.path / "meta.json", meta)


def read_metadata(folder: Folder) -> dict[str, Any]:
    """Return meta.json; what has another type there than it is written with counts as missing."""
    meta = dict[str, Any]()
    for name, value in read_json(folder.path / "meta.json").items():
        if value is None or isinstance(value, METADATA.get(name, object)):
            meta[name] = value
    meta["history"] = [entry for entry in meta.get("history") or [] if isinstance(entry, dict)]
    job, data = meta.get("job") or {}, meta.get("data") or {}
    types: dict[str, Any] = {"id": str, "scheduler": str, "logs": (str, type(None)), "profile": (dict, type(None))}
    if job and not all(isinstance(job.get(name), kind) for name, kind in types.items()):
        del meta["job"]
    if not isinstance(data.get("sha256", {}), dict):
        meta["data"] = {name: value for name, value in data.items() if name != "sha256"}
    return meta


def record_attempt_start(folder: Folder) -> None:
    """Add this attempt to the history in meta.json. Raises UserError."""
    slurm = {name: value for name, value in os.environ.items() if name.startswith(("SLURM_JOB", "SLURM_RESTART"))}
    entry = {"attempt": folder.number, "start": format_utc_now(), "end": None, "state": "running"}
    entry |= identify_process() | {"slurm": slurm or None, "starter": identify_launcher()}
    meta = read_metadata(folder)
    meta["history"].append(entry)
    write_json(folder.path / "meta.json", meta)


def identify_process() -> dict[str, Any]:
    """Return what identifies this process, also after it has ended: host, boot, namespace, pid and start time."""
    return {
        "host": socket.gethostname(),
        "boot": read_boot_id(),
        "pid_namespace": read_pid_namespace(),
        "pid": os.getpid(),
        "pid_started": Process.identify(os.getpid()).start,
    }


def read_boot_id() -> str:
    """Return the id of this boot, which stays when the host is renamed; empty where it is not known."""
    return read_or_empty("/proc/sys/kernel/random/boot_id").strip()


def read_pid_namespace() -> str:
    """Return the namespace in which this process's pid counts, such as that of a container; empty if not known."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (its target is no path)
    except OSError:
        return ""


def identify_launcher() -> str | None:
    """Return what identifies the SLURM job, or else the torchrun, that started this process; None without either."""
    if "SLURM_JOB_ID" in os.environ:
        return f"slurm {os.environ.get('SLURM_CLUSTER_NAME')} {os.environ['SLURM_JOB_ID']}"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        agent = Process.identify(os.getppid())
        return f"torchrun {os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {agent.pid} {agent.start}"
    return None


def find_earlier_run(runs: Path, name: str, arguments: list[str]) -> Folder | None:
    """Return the run that an earlier attempt of the same job or torchrun made with the same command line."""
    for path in sorted(runs.glob(f"{name}-*/meta.json"), reverse=True):
        meta = read_metadata(Folder(path.parent))
        begun = [entry.get("starter") for entry in meta["history"][:1]]
        if begun == [identify_launcher()] != [None] and meta.get("argv", [])[1:] == arguments:
            return Folder(path.parent)
    return None


def update_metadata(folder: Folder, **facts: Any) -> None:
    """Add facts to meta.json. Raises UserError."""
    write_json(folder.path / "meta.json", read_metadata(folder) | facts)


def record_attempt_end(folder: Folder, state: str) -> None:
    """Write state and time of its end to the newest attempt in meta.json's history. Raises UserError."""
    meta = read_metadata(folder)
    if meta["history"]:
        meta["history"][-1] |= {"state": state, "end": format_utc_now()}
        write_json(folder.path / "meta.json", meta)


def advise_new_run(folder: Folder) -> str:
    """Return the command to type where a run's own source, which a resumed run uses, has an error."""
    new = f'make exp NAME={folder.experiment} ARGS="..."'
    return f"{new}, a new run, once the error is mended: RESUME would run {folder.path}/code as it was"
