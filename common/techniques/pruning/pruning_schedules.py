"""Pruning schedules, which determine after which steps masks change and how sparse the new masks are."""

from __future__ import annotations

from configs.sparse_prune import Config


def compute_sparsity(cfg: Config, step: int, total: int) -> float | None:
    """Return the sparsity (0 to 1) of the masks that are created after `step` of `total` steps; None for no change.

    The schedule `oneshot` prunes once, at cfg.begin. `iterative` prunes the same fraction of the remaining weights in
    each of cfg.rounds rounds (Han et al. 2015, arXiv 1506.02626). `cubic` increases the sparsity to s (1 - (1 - t)^3),
    where s is cfg.sparsity and t increases from 0 at cfg.begin to 1 at cfg.end (Zhu and Gupta 2017, arXiv 1710.01878).
    `rigl` keeps the sparsity constant and changes the masks every cfg.every steps (Evci et al. 2019, arXiv 1911.11134).
    """
    begin = round(cfg.begin * total)
    end = round(cfg.end * total)
    match cfg.schedule:
        case "oneshot":
            return cfg.sparsity if step == begin else None
        case "iterative":
            round_steps = [begin + (end - begin) * i // cfg.rounds for i in range(1, cfg.rounds + 1)]
            if step not in round_steps:
                return None
            done = sum(round_step <= step for round_step in round_steps)  # in a short run, several rounds may coincide
            return 1 - (1 - cfg.sparsity) ** (done / cfg.rounds)
        case "cubic":
            is_due = begin < step < end and (step - begin) % cfg.every == 0
            remaining = (end - step) / max(1, end - begin)
            return cfg.sparsity * (1 - remaining**3) if is_due or step == end else None
        case "rigl":
            is_due = step < end and step % cfg.every == 0
            return cfg.sparsity if step == 0 or is_due else None
    return None


def compute_reached_sparsity(cfg: Config, step: int, total: int) -> float:
    """Return the highest sparsity (0 to 1) of the masks that are created up to and after `step` of `total` steps."""
    sparsities = (compute_sparsity(cfg, earlier, total) for earlier in range(step + 1))
    return max((sparsity for sparsity in sparsities if sparsity is not None), default=0.0)
