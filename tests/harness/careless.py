"""An experiment without one of its protections, for tests of what the protection is for.

    python -m tests.harness.careless attempts experiments/mnist_pipeline.py key=value ...

Instead of one of DROPS, MODULE:FUNCTION names a function that drops a technique's own protection.
"""

from __future__ import annotations

import pkgutil
import runpy
import sys
from collections.abc import Mapping
from typing import Any

from common.checkpoint.save_or_stop_vote import Decision, SaveOrStopVote
from common.runs.folder import RunFolder
from common.techniques.data_parallel import ddp


def drop_settling() -> None:
    """DDP regroups its buckets whenever it likes."""
    ddp.warm_up_buckets = lambda *_: None


def drop_attempts() -> None:
    """A new start writes where the one before wrote."""
    begin = RunFolder.claim_attempt

    def claim_once(self: RunFolder, claim: Mapping[str, Any] | None = None) -> RunFolder:
        return self.list_attempts()[-1] if self.list_attempts() else begin(self, claim)

    RunFolder.claim_attempt = claim_once  # type: ignore[method-assign]


def drop_vote() -> None:
    """Each rank leaves when it is told, without asking the others."""

    def decide_alone(
        vote: SaveOrStopVote, step: int, diverged: bool, came: float, *, run_taken: bool = False
    ) -> Decision:
        vote.next_step = step + 1
        told = bool(vote.stop_request.signal_number)
        return Decision(told, told, diverged)

    SaveOrStopVote.vote_after_step = decide_alone  # type: ignore[method-assign,assignment]


DROPS = {
    "": lambda: None,
    "settling": drop_settling,
    "attempts": drop_attempts,
    "vote": drop_vote,
}

if __name__ == "__main__":
    protection = sys.argv[1]
    drop = DROPS[protection] if protection in DROPS else pkgutil.resolve_name(protection)
    drop()
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
