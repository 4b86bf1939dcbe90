"""The cause of an error, which follows from its class or from the text of a library."""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import FrozenInstanceError
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, DistStoreError, FileStore
from torch.futures import Future

from common.ranks.links.outgoing import LinkError
from common.system.causes import Cause
from common.system.errors import (
    CausedRuntimeError,
    MachineError,
    RankTimeoutError,
    RunTakenError,
    UnreachableError,
    UserError,
)
from common.system.foreign_text import classify_error, classify_exit, classify_recorded_text

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] "

ERRORS_BY_CAUSE: dict[Cause, list[Exception]] = {
    Cause.TIMEOUT: [
        RuntimeError(f"{GLOO}Timed out waiting 1800000ms for recv operation to complete"),
        RuntimeError(f"{GLOO}Application timeout caused pair closure"),
        RuntimeError("Watchdog caught collective operation timeout: ran for 600 milliseconds before"),
        RankTimeoutError("all_reduce: rank 1 does not answer"),
        DistStoreError("wait timeout after 3000ms, keys: /default_pg/0"),
        RuntimeError("Timeout waiting for key: here/1 after 300 ms"),
        RuntimeError("RankTimeoutError: all_reduce: rank 1 does not answer"),
    ],
    Cause.LOST_PEER: [
        RuntimeError("DistNetworkError: all_reduce: rank 1 has closed its connection"),
        DistNetworkError("all_reduce: rank 1 timed out"),
        RuntimeError(f"{GLOO}Connection closed by peer [127.0.0.1]:3141"),
        RuntimeError(f"{GLOO}Read error [127.0.0.1]:2957: Connection reset by peer. This is"),
        LinkError("rank 1 has closed its connection; see its log"),
        CausedRuntimeError("a worker has been lost", cause=Cause.LOST_PEER),
    ],
    Cause.OTHER: [
        RuntimeError("the cache does not handle a RankTimeoutError: it timed out"),
        TimeoutError("the label server did not answer within 3 s"),
        OSError("HTTPSConnectionPool(host='labels', port=443): Read timed out."),
        RuntimeError("DataLoader timed out after 5 seconds"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc:10] op.nbytes. 8 vs 4"),
        PermissionError(errno.EACCES, "Permission denied", "/runs/timeout/Read-only"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        UserError("the loss of step 3 is nan; raise launch.step_timeout"),
        MachineError("no batch for 9 s; raise launch.step_timeout"),
    ],
    Cause.OUT_OF_MEMORY: [RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError()],
    Cause.THREAD_SHORTAGE: [RuntimeError("can't start new thread")],
    Cause.DISK_FULL: [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))],
    Cause.MISSING_PACKAGE: [ModuleNotFoundError("No module named 'x'")],
    Cause.SOURCE_ERROR: [
        ValueError("the loss of step 3 timed out"),
        FrozenInstanceError("cannot assign to field 'width'"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ],
    Cause.DIVERGED: [UserError("the loss of step 3 is nan", cause=Cause.DIVERGED)],
    Cause.UNREACHABLE: [UnreachableError("rank 1 did not join")],
    Cause.RUN_TAKEN: [RunTakenError("was superseded")],
}
CAUSES_BY_ERROR = [(error, cause) for cause, errors in ERRORS_BY_CAUSE.items() for error in errors]


@pytest.mark.parametrize("error, cause", CAUSES_BY_ERROR)
def test_the_class_of_an_error_has_precedence_over_its_text(error: BaseException, cause: Cause) -> None:
    assert classify_error(error) is cause


def test_a_key_that_no_rank_sets_in_a_file_store_is_a_timeout(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(RuntimeError) as caught:
        store.wait(["missing"], timedelta(milliseconds=1))
    assert classify_error(caught.value) is Cause.TIMEOUT, caught.value


CONVERTED_ERRORS = [
    (RankTimeoutError("rank 1 does not answer"), Cause.TIMEOUT),
    (DistNetworkError("rank 1 has exited"), Cause.LOST_PEER),
]


@pytest.mark.parametrize("error, cause", CONVERTED_ERRORS)
def test_an_error_that_torch_converts_to_text_keeps_its_cause(error: Exception, cause: Cause) -> None:
    first: Future[Exception] = Future()
    second = first.then(lambda future: future.value())
    first.set_exception(error)
    with pytest.raises(RuntimeError) as caught:
        second.wait()
    assert type(caught.value) is RuntimeError
    assert classify_error(caught.value) is cause


CAUSES_BY_TEXT = {
    "rank 1 on vm did not answer within 8 s; check the log of each unresponsive rank": Cause.SILENT_RANK,
    "all_reduce: rank 1 does not answer (no progress for 120 s); raise launch.step_timeout": Cause.TIMEOUT,
    "data worker 0 has returned no batch for 9 s; raise launch.step_timeout or lower data.block": Cause.OTHER,
    "all_reduce: rank 1 has closed its connection; see its log": Cause.LOST_PEER,
    "rank 1 was killed by SIGKILL: the system ran out of memory": Cause.OUT_OF_MEMORY,
    "rank 1 was killed by SIGKILL": Cause.KILLED,
    "no valid checkpoint left (attempt 1 step 2): rank-0.pt is damaged": Cause.NO_VALID_CHECKPOINT,
    "cannot write runs/x: the disk is full; free up space": Cause.DISK_FULL,
    "the loss of step 3 is nan": Cause.DIVERGED,
    "rank 1 failed: TypeError: of x": Cause.SOURCE_ERROR,
    "after step 3: RuntimeError: mat1 and mat2 shapes cannot be multiplied": Cause.SOURCE_ERROR,
    "rank 0 failed: RuntimeError: communication between ranks failed repeatedly although no": Cause.OTHER,
    "2 attempts in a row ended without a new checkpoint": Cause.OTHER,
}


@pytest.mark.parametrize("text, cause", CAUSES_BY_TEXT.items())
def test_recorded_text_of_older_versions_has_a_cause(text: str, cause: Cause) -> None:
    assert classify_recorded_text(text) is cause


LOGS_OF_ABORTED_PROCESSES = [
    ("terminate called without an active exception\n", -signal.SIGABRT, True),
    ("terminate called without an active exception\n", -signal.SIGSEGV, False),
    ("what():  Resource temporarily unavailable", -signal.SIGABRT, False),
    ("of 'std::system_error'\n  what():  Resource temporarily unavailable", -signal.SIGABRT, True),
    ("libgomp: Thread creation failed: Resource temporarily unavailable", 1, True),
    ("libgomp: Thread creation failed: Resource temporarily unavailable", -signal.SIGSEGV, False),
    ("NCCL WARN socket: Resource temporarily unavailable", 1, False),
    ("Fatal Python error: Aborted", -signal.SIGABRT, False),
]


@pytest.mark.parametrize("log, exit_code, is_shortage", LOGS_OF_ABORTED_PROCESSES)
def test_only_the_last_lines_of_an_aborted_process_show_a_shortage_of_threads(
    log: str, exit_code: int, is_shortage: bool
) -> None:
    assert (classify_exit(exit_code, log) is Cause.THREAD_SHORTAGE) == is_shortage
