"""Points in a step of param_server at which tests/harness/elastic/faults.py kills or stops a rank."""

from __future__ import annotations

from collections.abc import Callable

from common.techniques.parameter_server.worker import ParameterServerRank


def plant_points(before: Callable[..., None], reach: Callable[[str], None]) -> None:
    """Call `reach` before `pull`, `push` and `push to N`, where N is the rank of a server."""
    before(ParameterServerRank, "pull", lambda *_: reach("pull"))
    before(ParameterServerRank, "push", lambda *_: reach("push"))
    before(ParameterServerRank, "_send_large_message", lambda _, __, server, ___: reach(f"push to {server}"))
