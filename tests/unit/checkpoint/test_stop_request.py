"""Stop requests: when a signal stops a process at once or lets it save first, and dumps of stacks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from common.checkpoint import stop_request
from common.checkpoint.stop_request import StopRequest
from common.system.exit_status import EXIT_RESUMABLE
from tests.harness.commands.processes import wait_until

CaseBody = Callable[[StopRequest], None]
BODY_FAILED = 99  # exit status


def send_signal_to_self(stop: StopRequest, number: int) -> None:
    """Send a signal to this process, and wait until it was received."""
    os.kill(os.getpid(), number)
    wait_until(lambda: stop.first_signal_time is not None, "the signal is received", 10.0)


def run_in_fork(body: CaseBody, log_file: Path) -> int:
    """Call `body` in a forked process that listens for stop requests, and return the exit status."""

    def run_body() -> NoReturn:
        status = 0
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # commands in the background ignore this signal
            log = open(log_file, "w")  # noqa: SIM115 (the thread that reads signals uses it until the process exits)
            body(StopRequest.listen(60, log))
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            status = BODY_FAILED
        finally:
            os._exit(status)

    pid = os.fork()
    if not pid:
        run_body()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def test_the_first_signal_after_a_request_of_the_run_does_not_count_as_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_request, "REPEATED_SIGNAL_SECONDS", 0.0)

    def request_stop_before_signals(stop: StopRequest) -> None:
        stop.request_stop()
        assert stop.signal_number == signal.SIGUSR2
        send_signal_to_self(stop, signal.SIGINT)
        send_signal_to_self(stop, signal.SIGTERM)
        time.sleep(10)

    assert run_in_fork(request_stop_before_signals, tmp_path / "log") == 128 + signal.SIGTERM


def test_the_grace_time_starts_with_the_first_signal_after_a_request_of_the_run(tmp_path: Path) -> None:
    """The run may need more time to save, because no other program limits it."""
    log_file = tmp_path / "log"
    signal_is_sent = tmp_path / "signal_is_sent"

    def request_stop_before_signal(stop: StopRequest) -> None:
        stop.grace = 0.05
        stop.request_stop()
        stop.dump_stacks_after(0.1)
        wait_until(lambda: "Timeout (0:00:00.1" in log_file.read_text(), "the stacks are written")
        signal_is_sent.touch()
        send_signal_to_self(stop, signal.SIGUSR2)
        time.sleep(10)

    assert run_in_fork(request_stop_before_signal, log_file) == 1
    assert signal_is_sent.exists()


@pytest.mark.parametrize("has_unsaved_work", [False, True])
def test_a_signal_stops_at_once_only_without_unsaved_work(has_unsaved_work: bool, tmp_path: Path) -> None:
    def receive_signal(stop: StopRequest) -> None:
        with stop.interruptible(lambda: not has_unsaved_work):
            send_signal_to_self(stop, signal.SIGUSR2)
        os._exit(3)

    status = run_in_fork(receive_signal, tmp_path / "log")
    assert status == (3 if has_unsaved_work else EXIT_RESUMABLE)


def test_a_signal_after_an_interruptible_block_does_not_stop_at_once(tmp_path: Path) -> None:
    def receive_signal(stop: StopRequest) -> None:
        with stop.interruptible():
            pass
        send_signal_to_self(stop, signal.SIGUSR2)
        os._exit(3)

    assert run_in_fork(receive_signal, tmp_path / "log") == 3


def test_no_stacks_are_dumped_after_the_watchdog_was_switched_off(tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    with open(log_file, "w+") as log:
        stop = StopRequest(60, log)
        stop.dump_stacks_after(0.05)
        wait_until(lambda: "Timeout" in log_file.read_text(), "the stacks are written")
        stop.dump_stacks_after(0.05)
        stop.dump_stacks_after(None)
        log.truncate(0)
        time.sleep(0.2)
        assert not log_file.read_text()
        stop.cancel_watchdog()
