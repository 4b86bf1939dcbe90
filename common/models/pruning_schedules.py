"""Pruning schedules: after which steps masks change, and the sparsity that they get."""

from __future__ import annotations

from configs.sparse_prune import Config


def compute_sparsity(cfg: Config, step: int, total: int) -> float | None:
    """Return the sparsity (0 to 1) that masks get after `step` of `total` steps; None where they stay as they are.

    oneshot prunes once, at cfg.begin; iterative prunes the same fraction of what is left in each of cfg.rounds rounds
    (Han et al. 2015, arXiv 1506.02626); cubic follows s (1 - (1 - t)^3) with t from 0 to 1 between cfg.begin and
    cfg.end (Zhu and Gupta 2017, arXiv 1710.01878); rigl keeps its sparsity and changes masks every cfg.every steps
    (Evci et al. 2019, arXiv 1911.11134).
    """
    begin, end = round(cfg.begin * total), round(cfg.end * total)
    match cfg.schedule:
        case "oneshot":
            return cfg.sparsity if step == begin else None
        case "iterative":
            marks = [begin + (end - begin) * i // cfg.rounds for i in range(1, cfg.rounds + 1)]
            done = sum(mark <= step for mark in marks)  # in a short run several may fall on one step
            return 1 - (1 - cfg.sparsity) ** (done / cfg.rounds) if step in marks else None
        case "cubic":
            due = begin < step < end and (step - begin) % cfg.every == 0
            left = (end - step) / max(1, end - begin)
            return cfg.sparsity * (1 - left**3) if due or step == end else None
        case "rigl":
            return cfg.sparsity if step == 0 or (step < end and step % cfg.every == 0) else None
    return None
