"""Execute a command in a process that was forked from the fork server after its imports.

A command that replaces itself with a script of the project, as `slurm exp` does, executes the script in the same
process. A command that starts a script or a command of the project, as `slurm sweep` and `slurm rerun` do, forks
itself. The sources may be those in the folder code/ of a run. They are imported again, but torch is not. All other
programs are real processes.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import runpy
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness.commands import execution

PROJECT_PACKAGES = ("common", "configs", "experiments", "slurm", "tests")
PIPE_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")  # names in subprocess.Popen
CHILD_PIPE_ENDS = ("p2cread", "c2pwrite", "errwrite")  # the ends of the child's stdin, stdout and stderr
COMMAND_FILE_NAME = "forked-command"  # of the open file with the command line and environment of a forked command
INITIAL_IMPORT_PATH = tuple(sys.path[1:])  # without the folder of a command
PARENT_STREAMS: list[Any] = []
"""Streams of the parent. They stay referenced, because closing them would write its buffers to this process's files."""


def set_up_process(
    arguments: list[str], env: Mapping[str, str], cwd: Path, streams: Sequence[int], root: Path, *, new_session: bool
) -> None:
    """Give this forked process the state of a new command: command line, variables, folder, streams and sources."""
    if new_session:
        os.setsid()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    PARENT_STREAMS.append((sys.stdin, sys.stdout, sys.stderr))
    # new objects without the server's buffers and modes; they stay open until the process exits
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace", buffering=1)  # noqa: SIM115
    os.chdir(cwd)
    # find_processes() reads this file, because /proc shows the command line of the server.
    command_file = os.memfd_create(COMMAND_FILE_NAME)
    assignments = [f"{name}={value}" for name, value in env.items()]
    os.write(command_file, "\0".join([*arguments, *assignments]).encode())
    set_command_line(arguments, env, root)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.execve = execute_in_this_process  # type: ignore[assignment]
    subprocess.Popen._execute_child = start_as_fork  # type: ignore[attr-defined]


def set_command_line(arguments: list[str], env: Mapping[str, str], root: Path) -> None:
    """Set the arguments, variables, sources and import path that a new interpreter would have."""
    variables = dict(env)  # a copy, because `env` may be os.environ
    os.environ.clear()
    os.environ.update(variables)
    is_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if is_module else arguments
    search_path = list(INITIAL_IMPORT_PATH)
    if variables.get("PYTHONPATH"):
        search_path.insert(0, str(root))
    if not variables.get("PYTHONSAFEPATH"):
        search_path.insert(0, str(Path.cwd() if is_module else Path(arguments[0]).parent))
    sys.path[:] = search_path
    loaded = sys.modules.get("common")
    loaded_root = Path(loaded.__path__[0]).parent if loaded else None
    if loaded_root != root:
        for name in list(sys.modules):
            if name.partition(".")[0] in PROJECT_PACKAGES:
                del sys.modules[name]


def execute_in_this_process(
    program: str, argv: list[str], env: Mapping[str, str], real_execve: Any = os.execve
) -> None:
    """Replace os.execve: execute a script of the project in this process, which has executed its imports."""
    root = execution.find_source_root(env)
    if program != argv[0] or not execution.can_fork(argv, env, Path.cwd(), root):
        real_execve(program, argv, env)
    set_command_line(argv[1:], env, root)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    exit_process(execute_as_main(argv[1:]))


def start_as_fork(self: Any, *arguments: Any, real_start: Any = subprocess.Popen._execute_child) -> None:  # type: ignore[attr-defined]
    """Replace the start of processes in subprocess.Popen: scripts and commands of the project are forked."""
    options = inspect.signature(real_start).bind(self, *arguments).arguments
    argv = options["args"]
    env = os.environ if options["env"] is None else options["env"]
    cwd = Path(options["cwd"] or Path.cwd())
    root = execution.find_source_root(env)
    may_fork = is_forkable(options) and execution.NO_FORK_VARIABLE not in os.environ
    if not (may_fork and execution.can_fork(argv, env, cwd, root)):
        real_start(self, *arguments)
        return
    pipes = {name: options[name] for name in PIPE_ENDS}
    self.pid = os.fork()
    if self.pid == 0:
        try:
            streams = copy_streams(pipes)
            ignores_interrupt = drop_inherited_state(streams)
            set_up_process(argv[1:], env, cwd, streams, root, new_session=options["start_new_session"])
            if ignores_interrupt:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            exit_process(execute_as_main(argv[1:]))
        finally:
            os._exit(1)
    self._child_created = True
    self._close_pipe_fds(*pipes.values())


def copy_streams(pipes: Mapping[str, int]) -> list[int]:
    """Return copies of the child's stdin, stdout and stderr: of a pipe, or of the parent's stream if there is none."""
    streams = []
    for number, name in enumerate(CHILD_PIPE_ENDS):
        has_pipe = pipes[name] != -1
        streams.append(os.dup(pipes[name] if has_pipe else number))
    return streams


def is_forkable(options: Mapping[str, Any]) -> bool:
    """Return whether Popen was called without special options, for a script or a command, in the only thread."""
    argv = options["args"]
    if not isinstance(argv, list) or len(argv) <= 2:
        return False
    if options["pass_fds"] or options["preexec_fn"] is not None:
        return False
    if not argv[1].endswith(".py") and argv[2].partition(".")[0] not in execution.COMMAND_PACKAGES:
        return False
    threads = list(Path("/proc/self/task").iterdir())
    return len(threads) == 1  # a fork would lose other threads


def drop_inherited_state(streams: Sequence[int]) -> bool:
    """Drop the state that a new process would not inherit. Return whether the process ignores Ctrl-C.

    File descriptors stay valid, because objects of the parent command use them, but refer to the null device. Thus
    locks are released.
    """
    with open(os.devnull, "r+b", buffering=0) as null_file:
        kept_descriptors = {0, 1, 2, *streams, null_file.fileno()}
        descriptors = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
        for descriptor in descriptors:
            if descriptor not in kept_descriptors:
                with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed
                    os.fstat(descriptor)
                    os.dup2(null_file.fileno(), descriptor, inheritable=False)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, signal.Handlers):
            signal.signal(number, signal.SIG_DFL)
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def execute_as_main(arguments: list[str]) -> int:
    """Execute a script or module as `__main__`, and return the exit status of an interpreter."""
    try:
        if arguments[0] == "-m":
            sys.modules.pop(sys.argv[0], None)  # the module is executed again, as __main__
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        return get_exit_status(end)
    except BaseException:
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as end:
            return get_exit_status(end)
        return 1
    return 0


def get_exit_status(end: SystemExit) -> int:
    """Return the exit status of an exception. A message is printed, as the interpreter does."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def exit_process(status: int) -> None:
    """Exit as an interpreter does, but do not destroy the modules that the server has imported."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
