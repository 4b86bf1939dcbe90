"""Private folder of an attempt: key and certificate for TLS and, on a cluster, the file of the rendezvous store.

The folder lies in the run folder, which all hosts share, and has mode 0700: every process that can read it is trusted
as a rank. Rank 0 creates it and deletes the key after all ranks have connected. Later connections use the copies in
memory.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from common.core.errors import UnreachableError, UserError
from common.distributed.rank_info import RankInfo
from common.distributed.transport import certificates
from common.distributed.transport.certificates import Identity
from common.runs import provenance
from common.runs.folder import RunFolder
from configs.launch import Launch

DEFAULT_CERTIFICATE_SECONDS = 7 * 86400.0  # without a time limit; certificates are checked on connecting only
MAX_CERTIFICATE_SECONDS = 365 * 86400.0
POLL_SECONDS = 0.05


def check_tls(settings: Launch, rank_info: RankInfo | None) -> None:
    """Raise UserError if `launch.tls=true` is impossible; `rank_info` is None before local ranks are forked."""
    if not settings.tls:
        return
    if rank_info is not None and rank_info.launcher == "torchrun":
        raise UserError(
            "launch.tls=true: torchrun's rendezvous store does not authenticate its clients; start the run with make "
            "exp or srun, or omit launch.tls"
        )
    if rank_info is None or rank_info.rank == 0:
        certificates.check_openssl()


def get_private_folder(base: Path, rank_info: RankInfo) -> Path:
    """Return the path of the private folder of a job's attempt; all hosts of the job share `base`."""
    return base / f".private-{rank_info.attempt_id}"


def open_identity(folder: Path, rank_info: RankInfo, timeout_seconds: float) -> Identity:
    """Load the identity of this attempt. Rank 0 creates it in a new private folder, the other ranks wait for it.

    Raises UserError, and UnreachableError if the folder does not appear within the timeout.
    """
    if rank_info.rank == 0:
        folder.parent.mkdir(parents=True, exist_ok=True)
        certificates.make_identity(folder, compute_certificate_seconds(folder.parent))
    deadline = time.monotonic() + timeout_seconds
    while not is_visible(folder):
        if time.monotonic() > deadline:
            raise UnreachableError(
                f"rank {rank_info.rank} does not see {folder}, which rank 0 creates for launch.tls=true; see the log "
                "of rank 0, set runs= to a folder that all hosts share, or raise launch.setup_timeout"
            )
        time.sleep(POLL_SECONDS)
    return certificates.load_identity(folder)


def is_visible(folder: Path) -> bool:
    """Return whether a folder exists. It lists the parent folder, because network file systems cache lookups."""
    try:
        return folder in folder.parent.iterdir()
    except FileNotFoundError:  # rank 0 may still have to create the parent
        return False


def compute_certificate_seconds(run_folder: Path) -> float:
    """Return the required lifetime of a certificate: until the job's time limit if there is one.

    Older versions of SLURM do not report the end of a job. Then the time limit of its cluster profile is used.
    """
    job_end = os.environ.get("SLURM_JOB_END_TIME", "")
    if job_end.isdecimal():
        remaining = int(job_end) - time.time()
        return min(max(0.0, remaining), MAX_CERTIFICATE_SECONDS)
    job = provenance.read_metadata(RunFolder(run_folder)).get("job") or {}
    profile = job.get("profile") or {}
    minutes = profile.get("time") if "SLURM_JOB_ID" in os.environ else None
    if isinstance(minutes, int) and minutes > 0:
        return min(60.0 * minutes, MAX_CERTIFICATE_SECONDS)
    return DEFAULT_CERTIFICATE_SECONDS


def delete_key(folder: Path) -> None:
    """Delete the key and the certificate after all ranks have read them."""
    for name in (certificates.KEY_FILE, certificates.CERTIFICATE_FILE):
        (folder / name).unlink(missing_ok=True)
