"""Seeds of all random choices: one named stream per purpose, all derived from one seed.

Two streams never share numbers by accident (`seed + rank` does that), and a new purpose does not
shift the numbers of the old ones. Imports neither torch nor the rest of `common`.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for one purpose, as derive_seed(0, "order", epoch); stable over versions and machines."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def make_generator(seed: int, *purpose: str | int, skip: int = 0) -> np.random.Generator:
    """Return a numpy generator for one purpose, which has left out as many draws of 64 bits as `skip` says."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, *purpose)).advance(skip))


def pack_rng_state(state: Any) -> list[Any]:
    """Convert the state of numpy's legacy generator to what a checkpoint holds."""
    import torch

    kind, key, position, has_gauss, gauss = state
    return [str(kind), torch.from_numpy(np.asarray(key, np.int64)), int(position), int(has_gauss), float(gauss)]


def unpack_rng_state(packed: list[Any]) -> tuple[Any, ...]:
    """Convert back what `pack_rng_state` returned."""
    kind, key, *rest = packed
    return (kind, key.numpy().astype(np.uint32), *rest)
