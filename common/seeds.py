"""Where every random choice comes from: one named stream a purpose, all derived from one seed.

Two streams never share numbers by accident (`seed + rank` does that), and a new purpose does not
shift the numbers of the old ones. Imports neither torch nor the rest of `common`.
"""

from __future__ import annotations

import hashlib

import numpy as np


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, such as derive(0, "order", epoch); stable over versions and machines."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """A numpy generator for one purpose."""
    return np.random.Generator(np.random.PCG64(derive(seed, *purpose)))
