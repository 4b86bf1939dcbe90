"""Interface of state that differs between ranks, so that each rank saves and loads its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class LocalPart(Protocol):
    """State of a technique on one rank. A checkpoint of a different number of ranks does not restore such state."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values to save; an empty dict if there is nothing to save."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; an empty dict if the checkpoint does not contain this part."""

    def enter_group(self) -> None:
        """Continue in the new default process group of an elastic run, whose ranks have changed."""
