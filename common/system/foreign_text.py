"""Conversion of text and exceptions of other programs to causes.

Only this module and `slurm.scheduling.slurm_output` derive a cause from text. Other modules parse the output of
commands only for values, such as the names of hosts. The messages are those of the operating system, Python, torch,
gloo and NCCL. Errors of this project carry their cause (`CausedError`), so their messages are never searched, with two
exceptions. C++ code passes on any Python exception as a RuntimeError without a cause, whose message starts with the
name of the class of the exception. `classify_recorded_text` is for run folders of older versions, which contain
messages but no causes. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import errno
import re
import signal

from common.system.causes import PEER_CAUSES, Cause

# messages of Python, the operating system, libgomp and OpenBLAS
SHORTAGE_PATTERN = (
    "can't start new thread|unable to start .*thread|thread creation failed|pthread_create failed"
    r"|\bfork\b.*resource temporarily unavailable"
)
# the same messages, and two messages of std::thread, which gloo uses, in the log of an aborted process
ABORT_PATTERN = (
    f"{SHORTAGE_PATTERN}|terminate called without an active exception"
    r"|std::system_error'\s+what\(\):\s+resource temporarily unavailable"
)
FORK_FUNCTIONS = {"fork", "fork_exec", "_fork_exec"}  # functions of os and subprocess that fork

# gloo reports a timeout in two ways: "Timed out waiting ..." for the operation that waited, and "Application timeout
# caused pair closure" for operations that were queued behind it on the same connection.
TIMEOUT_PATTERN = r"(?i)timed out|timing out|(?<!_)timeout"
FOREIGN_PATTERNS = (
    (TIMEOUT_PATTERN, Cause.TIMEOUT),
    (r"(?i)(closed|reset) by peer|connection refused|broken pipe|pair closure", Cause.LOST_PEER),
    (r"(?i)out of memory|not enough memory|oom.kill|MemoryError|cannot allocate memory|bad_alloc", Cause.OUT_OF_MEMORY),
    (f"(?i){SHORTAGE_PATTERN}", Cause.THREAD_SHORTAGE),
    (r"No space left|[Qq]uota exceeded", Cause.DISK_FULL),
    (r"Read-only", Cause.DISK_READ_ONLY),
    (r"File too large", Cause.FILE_TOO_LARGE),
    (r"ModuleNotFoundError|ImportError", Cause.MISSING_PACKAGE),
)
"""Patterns in messages of other programs. The first match counts."""
OLD_PATTERNS = (
    (r"did not answer within", Cause.SILENT_RANK),
    (r"(?i)(did|does) not answer|neither sent nor took|no progress for", Cause.TIMEOUT),
    (r"closed its connection|connection with rank", Cause.LOST_PEER),
    (r"no more threads or processes can be started", Cause.THREAD_SHORTAGE),
    (r"disk is full|quota", Cause.DISK_FULL),
    (r"read-only", Cause.DISK_READ_ONLY),
    (r"the loss of step|no finite.number|contains? NaN|NaN or infinity|(?:is|are) not finite", Cause.DIVERGED),
    (r"no valid checkpoint left", Cause.NO_VALID_CHECKPOINT),
    (r"is damaged|(?:other|different) data than", Cause.DAMAGED_DATA),
    (r"time limit", Cause.JOB_TIME_LIMIT),
)
"""Patterns in messages that older versions of this project wrote. The first match counts."""

SOURCE_ERRORS = (
    AssertionError,
    AttributeError,
    dataclasses.FrozenInstanceError,
    IndexError,
    KeyError,
    NameError,
    NotImplementedError,
    RecursionError,
    TypeError,
    UnboundLocalError,
    ValueError,
    ZeroDivisionError,
)  # fmt: skip
DEVICE_PATTERN = r"CUDA|NCCL|gloo|[Cc]onnection|peer|[Tt]imed out|new thread|temporarily unavailable"
# matches the type of a source error at the start of a message, which older versions wrote after some words
RECORDED_SOURCE_ERROR = (
    rf"^(?:.*failed(?: first)?: )?(?:after step \d+: )?"
    rf"(?:(?:{'|'.join(kind.__name__ for kind in SOURCE_ERRORS)})\b|RuntimeError: (?!.*(?:{DEVICE_PATTERN})))"
)
# matches messages of torch.distributed; the last two are those of a FileStore, which raises plain RuntimeErrors
COMMUNICATION_PATTERN = (
    r"(?i)gloo|nccl|tensorpipe|\brpc\b|collective|Dist(Backend|Store)Error|^wait timeout\b|^timeout waiting for key: "
)
# matches the class name with which C++ code starts the message of an exception that it passes on
PASSED_ON_CLASS = r"^(?:Got the following error when running the callback: )?(\w+): "
CAUSES_OF_CLASS_NAMES = {"DistNetworkError": Cause.LOST_PEER, "RankTimeoutError": Cause.TIMEOUT}
"""Causes of exceptions whose classes this module cannot import, or that C++ code has passed on."""
CAUSES_OF_CLASSES = (
    (MemoryError, Cause.OUT_OF_MEMORY),
    (ImportError, Cause.MISSING_PACKAGE),
    (SystemExit, Cause.EXITED),
)
DISK_CAUSES = {
    errno.ENOSPC: Cause.DISK_FULL,
    errno.EDQUOT: Cause.DISK_FULL,
    errno.EROFS: Cause.DISK_READ_ONLY,
    errno.EFBIG: Cause.FILE_TOO_LARGE,
}


def find_first_match(text: str, patterns: tuple[tuple[str, Cause], ...]) -> Cause:
    """Return the cause of the first pattern that occurs in a text, or `Cause.OTHER`."""
    for pattern, cause in patterns:
        if re.search(pattern, text):
            return cause
    return Cause.OTHER


def classify_error(error: BaseException) -> Cause:
    """Return the cause of an exception.

    The cause of an exception of this project is its attribute `cause`. The cause of any other exception follows from
    its type, its error number, or its message.
    """
    cause = getattr(error, "cause", None)
    if isinstance(cause, Cause):
        return cause
    if is_thread_shortage(error):
        return Cause.THREAD_SHORTAGE
    for error_class, class_cause in CAUSES_OF_CLASSES:
        if isinstance(error, error_class):
            return class_cause
    if isinstance(error, OSError) and error.errno in DISK_CAUSES:
        return DISK_CAUSES[error.errno]
    return classify_message_of_error(error)


def classify_message_of_error(error: BaseException) -> Cause:
    """Return the cause of an exception whose class is that of several causes, such as RuntimeError."""
    if type(error) in SOURCE_ERRORS:
        return Cause.SOURCE_ERROR
    class_name = find_class_name(error)
    if class_name in CAUSES_OF_CLASS_NAMES:
        return CAUSES_OF_CLASS_NAMES[class_name]
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror  # without the name of a file
    cause = classify_text(text)
    if cause in PEER_CAUSES and not is_communication_error(error):
        return Cause.OTHER  # for example, a web server did not answer the code of an experiment in time
    if cause is Cause.OTHER and type(error) is RuntimeError and not re.search(DEVICE_PATTERN, text):
        return Cause.SOURCE_ERROR
    return cause


def find_class_name(error: BaseException) -> str:
    """Return the name of the class of an error, or of the Python exception that C++ code has passed on."""
    if type(error) is RuntimeError:
        match = re.search(PASSED_ON_CLASS, str(error))
        if match:
            return match[1]
    return type(error).__name__


def is_communication_error(error: BaseException) -> bool:
    """Return whether torch.distributed raised an error. Other errors do not come from another rank."""
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):  # base class of errors of torch.distributed
        return True
    return isinstance(error, RuntimeError) and bool(re.search(COMMUNICATION_PATTERN, str(error)))


def is_single_value_error(error: BaseException | None) -> bool:
    """Return whether a BatchNorm layer of torch raised an error because it got a single value per channel."""
    return str(error).startswith("Expected more than 1 value per channel when training")


def classify_text(text: str) -> Cause:
    """Return the cause in a message of another program, or `Cause.OTHER`."""
    return find_first_match(text, FOREIGN_PATTERNS)


def classify_recorded_text(text: str) -> Cause:
    """Return the cause in a message that was recorded without a cause.

    The message is in a log or a result of an older version of this project.
    """
    cause = find_first_match(text, OLD_PATTERNS + FOREIGN_PATTERNS)
    if cause is not Cause.OTHER:
        return cause
    if re.search(r"failed repeatedly", text):  # the message of an elastic run contains the name of an exception
        return Cause.OTHER
    if re.search(RECORDED_SOURCE_ERROR, text):
        return Cause.SOURCE_ERROR
    return Cause.KILLED if "was killed by" in text else Cause.OTHER


def classify_exit(exit_code: int, log: str) -> Cause:
    """Return why a process without an error message ended, given its exit code and the last lines of its log.

    `exit_code` is negative if a signal ended the process. Libraries that cannot start a thread abort the process
    (SIGABRT) or let the process exit. If any other signal ended the process, the log does not contain the cause.
    """
    if exit_code == -signal.SIGABRT and re.search(ABORT_PATTERN, log, re.IGNORECASE):
        return Cause.THREAD_SHORTAGE
    if exit_code > 0 and re.search(SHORTAGE_PATTERN, log, re.IGNORECASE):
        return Cause.THREAD_SHORTAGE
    return Cause.KILLED if exit_code < 0 else Cause.EXITED


def is_thread_shortage(error: BaseException) -> bool:
    """Return whether an error occurred because a thread or process could not be started."""
    if isinstance(error, BlockingIOError) and is_failed_fork(error):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(re.search(SHORTAGE_PATTERN, str(error), re.IGNORECASE))


def is_file_shortage(error: BaseException) -> bool:
    """Return whether an error occurred because this process cannot open another file or connection."""
    if isinstance(error, OSError):
        return error.errno == errno.EMFILE
    return isinstance(error, RuntimeError) and "Too many open files" in str(error)


def is_failed_fork(error: BlockingIOError) -> bool:
    """Return whether a function that forks raised the error. Sockets and locks raise the same error type."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return not FORK_FUNCTIONS.isdisjoint(trace.tb_frame.f_code.co_names)


def is_gloo_error(error: BaseException) -> bool:
    """Return whether a message of gloo, which contains the path of gloo's source file, caused an error."""
    return "gloo" in str(error).lower()


def is_out_of_limited_memory(error: BaseException) -> bool:
    """Return whether an error occurred because the memory of this process is limited (RLIMIT_DATA)."""
    # With little memory, oneDNN reports that it could not create a primitive.
    return classify_error(error) is Cause.OUT_OF_MEMORY or "could not create a primitive" in str(error)
