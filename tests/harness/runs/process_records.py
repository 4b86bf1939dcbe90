"""Records by which run folders identify processes."""

from __future__ import annotations

import subprocess
from typing import Any

from common.runs import provenance
from common.system.processes import Process

Popen = subprocess.Popen[bytes]


def identify_process(pid: int, **changes: Any) -> dict[str, Any]:
    """Return the identity of a process, as the claim of an attempt contains it."""
    start = Process.identify(pid).start
    return provenance.identify_process() | {"pid": pid, "pid_started": start} | changes
