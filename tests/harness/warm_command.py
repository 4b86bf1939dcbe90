"""What a process that was forked with all imports made does as a command: begin like a new one, start others, end.

A command that replaces itself by a script of the project, as `slurm exp` does, executes it in the same process. One
that starts a script or a command of the project, as `slurm sweep` and `slurm rerun` do, forks for it. Their sources may
be those of a run's code/, which are imported anew; torch is not. All other programs are real processes.
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

from tests.harness import warm

PROJECT = ("common", "configs", "experiments", "slurm", "tests")
COMMAND = "warm-command"  # the name of the open file that holds a forked command's line and environment
PATH = tuple(sys.path[1:])  # where everything is imported from, but for what a command's own folder adds
KEPT: list[Any] = []  # streams of the command before this one: what it has not written yet is not for this one


def become(
    words: list[str], env: Mapping[str, str], cwd: Path, streams: Sequence[int], root: Path, *, session: bool
) -> None:
    """Give this forked process a command's line, variables, folder, streams and sources; `streams` are closed."""
    if session:
        os.setsid()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    KEPT.append((sys.stdin, sys.stdout, sys.stderr))
    # anew, so that nothing of the server's buffers or modes is left; they stay open as long as the process lives
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace", buffering=1)  # noqa: SIM115
    os.chdir(cwd)
    told = os.memfd_create(COMMAND)  # /proc shows the server's line; processes_of() reads this
    os.write(told, "\0".join([*words, *(f"{key}={value}" for key, value in env.items())]).encode())
    take_command_line(words, env, root)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.execve = exec_here  # type: ignore[assignment]
    subprocess.Popen._execute_child = start_here  # type: ignore[attr-defined]


def take_command_line(words: list[str], env: Mapping[str, str], root: Path) -> None:
    """Give this process the arguments, variables, sources and import path that an interpreter begins with."""
    values = dict(env)  # which may be os.environ itself
    os.environ.clear()
    os.environ.update(values)
    module = words[0] == "-m"
    sys.argv = words[1:] if module else words
    own = [] if values.get("PYTHONSAFEPATH") else [str(Path.cwd() if module else Path(words[0]).parent)]
    sys.path[:] = [*own, *([str(root)] if values.get("PYTHONPATH") else []), *PATH]
    loaded = sys.modules.get("common")
    if loaded is None or Path(loaded.__path__[0]).parent != root:
        for name in [name for name in sys.modules if name.partition(".")[0] in PROJECT]:
            del sys.modules[name]


def exec_here(program: str, words: list[str], env: Mapping[str, str], instead: Any = os.execve) -> None:
    """os.execve, but that a script of the project finds its imports made."""
    root = warm.find_sources(env)
    if program != words[0] or not warm.can_fork(words, env, Path.cwd(), root):
        instead(program, words, env)
    take_command_line(words[1:], env, root)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    leave(execute(words[1:]))


def start_here(self: Any, *given: Any, instead: Any = subprocess.Popen._execute_child) -> None:  # type: ignore[attr-defined]
    """subprocess.Popen's start of a process, but that scripts and commands of the project are forks of this one."""
    asked = inspect.signature(instead).bind(self, *given).arguments
    words, env = asked["args"], os.environ if asked["env"] is None else asked["env"]
    cwd, root = Path(asked["cwd"] or Path.cwd()), warm.find_sources(env)
    plain = isinstance(words, list) and not asked["pass_fds"] and asked["preexec_fn"] is None
    known = plain and len(words) > 2 and (words[1].endswith(".py") or words[2].partition(".")[0] in warm.OURS)
    alone = len(list(Path("/proc/self/task").iterdir())) == 1  # a fork would lose other threads
    if not (known and alone and warm.can_fork(words, env, cwd, root)) or warm.REAL in os.environ:
        instead(self, *given)
        return
    ends = [asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
    self.pid = os.fork()
    if self.pid == 0:
        try:
            streams = [os.dup(n if ends[end] == -1 else ends[end]) for n, end in enumerate((0, 3, 5))]
            ignored = leave_behind(streams)
            become(words[1:], env, cwd, streams, root, session=asked["start_new_session"])
            if ignored:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            leave(execute(words[1:]))
        finally:
            os._exit(1)
    self._child_created = True
    self._close_pipe_fds(*ends)


def leave_behind(streams: Sequence[int]) -> bool:
    """Drop what a new process would not have of the one that starts it; returns whether it ignores Ctrl-C.

    Files stay open as numbers, which objects of the other command still hold, but without what was open: its locks.
    """
    with open(os.devnull, "r+b", buffering=0) as nothing:
        for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if descriptor > 2 and descriptor not in streams and descriptor != nothing.fileno():
                with contextlib.suppress(OSError):  # the one of the list itself
                    os.fstat(descriptor)
                    os.dup2(nothing.fileno(), descriptor, inheritable=False)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, signal.Handlers):
            signal.signal(number, signal.SIG_DFL)
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def execute(words: list[str]) -> int:
    """Execute a script or module as `__main__`; returns the exit status that the interpreter would give."""
    try:
        if words[0] == "-m":
            sys.modules.pop(sys.argv[0], None)  # the module is executed anew, as __main__
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        return exit_status(end)
    except BaseException:
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as end:
            return exit_status(end)
        return 1
    return 0


def exit_status(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def leave(status: int) -> None:
    """End as the interpreter does, but for taking apart what the server has imported."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
