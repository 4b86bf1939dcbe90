"""Private folder of an attempt, which contains the key and the certificate for TLS.

On a cluster, the folder also contains the file of the rendezvous store. The private folder has mode 0700 and is located
in the run folder, which all hosts share. Every process that can read the private folder is trusted as a rank. Rank 0
creates the folder, and deletes the key and the certificate after all ranks have connected. Later connections use copies
of the key and certificate in memory.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from common.backend import certificates
from common.backend.certificates import Identity
from common.ranks.rank_info import RankInfo
from common.runs import provenance
from common.runs.folder import RunFolder
from common.system.errors import UnreachableError, UserError
from configs.shared import Launch

DEFAULT_CERTIFICATE_SECONDS = 7 * 86400.0  # for runs without a time limit; checked only for new connections
MAX_CERTIFICATE_SECONDS = 365 * 86400.0
POLL_SECONDS = 0.05


def check_tls(settings: Launch, rank_info: RankInfo | None) -> None:
    """Raise UserError if `launch.tls=true` is set but cannot be used.

    `rank_info` is None if local ranks have not been forked yet.
    """
    if not settings.tls:
        return
    if rank_info is not None and rank_info.launcher == "torchrun":
        raise UserError(
            "launch.tls=true cannot be used with torchrun, because its rendezvous store does not authenticate clients; "
            "start the run with make exp or srun, or omit launch.tls"
        )
    if rank_info is None or rank_info.rank == 0:
        certificates.check_openssl_is_installed()


def create_or_load_identity(folder: Path, rank_info: RankInfo, timeout_seconds: float) -> Identity:
    """Load the TLS identity of this attempt, which rank 0 creates in a new private folder.

    The other ranks wait until they can see this folder. Raises UserError if the identity cannot be created or loaded,
    and UnreachableError if the folder does not appear within the timeout.
    """
    if rank_info.rank == 0:
        folder.parent.mkdir(parents=True, exist_ok=True)
        certificates.create_identity_files(folder, compute_certificate_seconds(folder.parent))
    deadline = time.monotonic() + timeout_seconds
    while not is_folder_visible(folder):
        if time.monotonic() > deadline:
            raise UnreachableError(
                f"rank {rank_info.rank} cannot find {folder}, which rank 0 creates for launch.tls=true; check the log "
                "of rank 0, set runs= to a folder that all hosts share, or raise launch.setup_timeout"
            )
        time.sleep(POLL_SECONDS)
    return certificates.load_identity(folder)


def is_folder_visible(folder: Path) -> bool:
    """Return whether a folder exists.

    This function lists the parent folder, because network file systems may cache that a single name does not exist.
    """
    try:
        return folder in folder.parent.iterdir()
    except FileNotFoundError:  # rank 0 may not have created the parent folder yet
        return False


def compute_certificate_seconds(run_folder: Path) -> float:
    """Return the required lifetime of a certificate in seconds.

    The certificate must be valid until the time limit of the job, if there is one. Older versions of SLURM do not
    report the end time of a job, so the time limit of the cluster profile is used instead.
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


def delete_key_and_certificate(folder: Path) -> None:
    """Delete the key and the certificate after all ranks have read them."""
    for name in (certificates.KEY_FILE, certificates.CERTIFICATE_FILE):
        (folder / name).unlink(missing_ok=True)
