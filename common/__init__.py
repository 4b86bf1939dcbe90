"""The packages that experiments share, and the answer to Ctrl-C while they are imported."""

import sys
from types import TracebackType


def _report_interrupt(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ctrl-C before a command has begun, while it still imports, is answered in one line like any later one."""
    if not issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, error, trace)
    print("\nstopped by Ctrl-C", file=sys.stderr)
    raise SystemExit(130)


sys.excepthook = _report_interrupt
