"""Points in a step of param_server at which tests/harness/elastic/faults.py kills or stops a rank."""

from __future__ import annotations

from collections.abc import Callable

from common.techniques.parameter_server.worker import ParameterServerRank


def plant_points(call_before: Callable[..., None], reach_point: Callable[[str], None]) -> None:
    """Call `reach` before `pull`, `push` and `push to N`, where N is the rank of a server."""
    call_before(ParameterServerRank, "pull", lambda *_: reach_point("pull"))
    call_before(ParameterServerRank, "push", lambda *_: reach_point("push"))
    call_before(ParameterServerRank, "_send_large_message", lambda _, __, server, ___: reach_point(f"push to {server}"))
