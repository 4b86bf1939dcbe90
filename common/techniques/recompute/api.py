"""What other techniques use to measure a recomputation."""

from __future__ import annotations

from common.techniques.recompute.blocks import observe_blocks
from common.techniques.recompute.kept_operations import is_kept

__all__ = ["is_kept", "observe_blocks"]
