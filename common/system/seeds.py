"""Seeds for all random choices. Each purpose has a named stream, and all streams are derived from one seed.

Different purposes never share a stream, whereas seeds such as `seed + rank` can coincide. A new purpose does not change
existing streams. This module imports neither torch nor other modules of `common`.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for one purpose, as in derive_seed(0, "order", epoch).

    The seed does not depend on software versions or machines.
    """
    text = "/".join(map(str, (seed, *purpose)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def make_generator(seed: int, *purpose: str | int, skip: int = 0) -> np.random.Generator:
    """Return a NumPy generator for one purpose that skips the first `skip` draws of 64 bits each."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, *purpose)).advance(skip))


def pack_rng_state(state: Any) -> list[Any]:
    """Convert the state of the legacy NumPy generator to values that can be stored in a checkpoint."""
    import torch

    algorithm, key, position, has_gauss, gauss = state
    key_tensor = torch.from_numpy(np.asarray(key, np.int64))
    return [str(algorithm), key_tensor, int(position), int(has_gauss), float(gauss)]


def unpack_rng_state(packed: list[Any]) -> tuple[Any, ...]:
    """Convert the values of `pack_rng_state` back to a generator state."""
    algorithm, key, *position = packed
    return (algorithm, key.numpy().astype(np.uint32), *position)
