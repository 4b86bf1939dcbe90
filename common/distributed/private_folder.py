"""The private folder of an attempt: its key and certificate for TLS and, on a cluster, the file by which ranks meet.

It lies in the run folder, which all hosts share, with mode 0700: whoever can read it is a rank. Rank 0 makes it, and
deletes the key when all ranks are connected: later connections need what they hold in memory.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from common.core.errors import Unreachable, UserError
from common.distributed.rank_info import RankInfo
from common.distributed.transport import certificates
from common.distributed.transport.certificates import Identity
from common.runs import provenance
from common.runs.folder import Folder
from configs.launch import Launch

DAYS = 86400.0
LIFE = 7 * DAYS  # seconds of a certificate where no end is known; it is looked at only when ranks connect
LONGEST = 365 * DAYS
PAUSE = 0.05  # seconds between two looks


def check_tls(settings: Launch, rank_info: RankInfo | None) -> None:
    """Raise UserError for `launch.tls=true` where it cannot be; `rank_info` is None before ranks are forked here."""
    if not settings.tls:
        return
    if rank_info is not None and rank_info.launcher == "torchrun":
        raise UserError(
            "launch.tls=true: ranks of torchrun meet through a store that asks nobody who it is; start the run by make "
            "exp or srun, or leave launch.tls out"
        )
    if rank_info is None or rank_info.rank == 0:
        certificates.check_openssl()


def name_folder(base: Path, rank_info: RankInfo) -> Path:
    """Return the private folder of this attempt of a job, in a folder that all its hosts share."""
    return base / f".private-{rank_info.attempt_id}"


def open_identity(folder: Path, rank_info: RankInfo, seconds: float) -> Identity:
    """Return the identity of this attempt, made by rank 0 in a new private folder; the others wait for it.

    Raises UserError, and Unreachable where it is not there after so many seconds.
    """
    if rank_info.rank == 0:
        folder.parent.mkdir(parents=True, exist_ok=True)
        certificates.make_identity(folder, compute_certificate_seconds(folder.parent))
    deadline = time.monotonic() + seconds
    while not is_listed(folder):
        if time.monotonic() > deadline:
            raise Unreachable(
                f"rank {rank_info.rank} does not see {folder}, which rank 0 makes for launch.tls=true; see its log, "
                "give runs= a folder that all hosts share, or raise launch.setup_timeout"
            )
        time.sleep(PAUSE)
    return certificates.load_identity(folder)


def is_listed(folder: Path) -> bool:
    """Return whether a folder is there. Listing the one above asks a network disk anew; rank 0 may make that, too."""
    try:
        return folder in folder.parent.iterdir()
    except FileNotFoundError:
        return False


def compute_certificate_seconds(run: Path) -> float:
    """Return for how many seconds a certificate is needed: until the end of the job's time limit, if there is one.

    Older versions of SLURM do not tell the end: then the time limit of the profile counts with which it was submitted.
    """
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if end.isdecimal():
        return min(max(0.0, int(end) - time.time()), LONGEST)
    profile = (provenance.read_metadata(Folder(run)).get("job") or {}).get("profile") or {}
    minutes = profile.get("time") if "SLURM_JOB_ID" in os.environ else None
    return min(60.0 * minutes, LONGEST) if isinstance(minutes, int) and minutes > 0 else LIFE


def delete_key(folder: Path) -> None:
    """Delete key and certificate, which all ranks have read."""
    for name in (certificates.KEY, certificates.CERTIFICATE):
        (folder / name).unlink(missing_ok=True)


def delete_folder(folder: Path) -> None:
    """Delete what is left of the folder."""
    shutil.rmtree(folder, ignore_errors=True)
