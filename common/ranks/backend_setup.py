"""Lookup of the module that sets up a communication backend, so that only runs with this backend import it.

Such a module defines these functions:

- `check_tls(launch, rank_info)` raises UserError if `launch.tls=true` cannot be used.
- `create_or_load_identity(key_folder, rank_info, timeout_seconds)` returns the TLS identity of the attempt.
- `register(rank_info, launch, hosts, interface, identity)` registers the backend with torch and returns the settings of
  its process groups.
- `delete_key_and_certificate(key_folder)` is called on rank 0 after all ranks have connected.
- `set_all_reduce_algorithm(launch, run_path, world)` is called on all ranks before training.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from common.ranks.rank_info import RankInfo
from configs.launch_rules import BACKEND_SETUPS


def import_backend_setup(backend: str) -> ModuleType | None:
    """Import the module that sets up a backend; return None for backends that torch contains."""
    name = BACKEND_SETUPS.get(backend)
    return None if name is None else importlib.import_module(name)


def get_key_folder(base: Path, rank_info: RankInfo) -> Path:
    """Return the path of the private folder of an attempt of a job, in which ranks find the key for TLS.

    All hosts of the job must share the folder `base`.
    """
    return base / f".private-{rank_info.attempt_id}"
