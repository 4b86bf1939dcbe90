"""Run an experiment without one of its protections, to show what this protection prevents.

    python -m tests.harness.runs.disabled_protection attempts experiments/mnist_pipeline.py key=value ...

The first argument is a key of PROTECTIONS, or MODULE:FUNCTION, a function that disables a protection of a technique.
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


def disable_bucket_warm_up() -> None:
    """Let DDP rebuild its buckets after a checkpoint was loaded."""
    ddp.warm_up_buckets = lambda *_: None


def disable_attempt_folders() -> None:
    """Let every start of a run write into the folder of the first attempt."""
    claim_attempt = RunFolder.claim_attempt

    def claim_once(self: RunFolder, claim: Mapping[str, Any] | None = None) -> RunFolder:
        attempts = self.list_attempts()
        return attempts[-1] if attempts else claim_attempt(self, claim)

    RunFolder.claim_attempt = claim_once  # type: ignore[method-assign]


def disable_vote() -> None:
    """Let each rank stop when it receives a stop request, without a vote of all ranks."""

    def decide_without_vote(
        vote: SaveOrStopVote, step: int, diverged: bool, wait_start: float, *, run_taken: bool = False
    ) -> Decision:
        vote.next_step = step + 1
        has_stop_request = bool(vote.stop_request.signal_number)
        return Decision(has_stop_request, has_stop_request, diverged)

    SaveOrStopVote.vote_after_step = decide_without_vote  # type: ignore[method-assign,assignment]


PROTECTIONS = {
    "": lambda: None,
    "bucket_warm_up": disable_bucket_warm_up,
    "attempts": disable_attempt_folders,
    "vote": disable_vote,
}

if __name__ == "__main__":
    protection = sys.argv[1]
    disable = PROTECTIONS.get(protection) or pkgutil.resolve_name(protection)
    disable()
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
