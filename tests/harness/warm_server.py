"""A process that has imported torch and the project once, and forks for each command that a test starts.

    python -m tests.harness.warm_server SOCKET      started by tests/harness/warm.py

A request is one message with the command line, the environment, the working directory and three file descriptors.
The answers are the pid, and at the end the wait status. A forked command runs as a script or module of its own
process would: as `__main__`, with its own signals, streams, exit hooks and exit status. The server ends when its stdin
closes, as it does when pytest is killed, and the commands that still run end with it. It has one thread only, as a fork
would lose the others: it uses neither autograd nor OpenMP, and its OpenBLAS has no threads.

A forked command that replaces itself by a script of the project, as `slurm exp` does, executes it in the same process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.harness import warm

PROJECT = ("common", "configs", "experiments", "slurm", "tests")
HUGE, MADV_COLLAPSE = 1 << 21, 25  # bytes of a huge page; the number of the advice in Linux's mman.h
LARGEST = 1 << 18  # bytes of a request
COMMAND = "warm-command"  # the name of the open file that holds a forked command's line and environment
# what experiments import inside functions, each 0.2 to 2 s
LAZY = (
    "matplotlib.pyplot",
    "safetensors.torch",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.optim",
    "torchvision.models",
    "torchvision.transforms.v2",
)


def preload() -> None:
    """Import the project and what it needs. Nothing is executed but imports."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's would start its threads when it is imported
    import common
    import configs
    import experiments
    import slurm

    for package in (configs, common, slurm, experiments):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for name in LAZY:
        importlib.import_module(name)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's take libraries of operators apart, and write to 30 MB for that
    gc.collect()
    gc.freeze()  # shared with the forked commands as long as nobody writes to it
    use_huge_pages()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lose threads"


def use_huge_pages() -> None:
    """Move this process's own memory into huge pages, as far as the kernel can: a fork copies an entry for each page.

    The 400 MB of the imports then take a fifth of the time to fork and to leave (MADV_COLLAPSE, Linux 6.1).
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *name = line.split()
        if "w" in access and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            begin, end = -(-begin // HUGE) * HUGE, end // HUGE * HUGE
            if begin < end:
                advise(begin, end - begin, MADV_COLLAPSE)


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Answer requests until stdin closes; returns None then, and in a forked process its request."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    running: dict[int, tuple[int, socket.socket]] = {}  # by a file descriptor of the process: its pid, who asked
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                for pid, _ in running.values():
                    kill_command(pid)
                return None
            if key.fileobj is listener:
                client, _ = listener.accept()
                text, streams, _, _ = socket.recv_fds(client, LARGEST, 3)
                if not text:  # the one who asked has gone
                    client.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    for _, other in running.values():
                        other.close()
                    for descriptor in running:
                        os.close(descriptor)
                    for opened in (selector, listener, client):
                        opened.close()
                    return json.loads(text) | {"streams": streams}
                for descriptor in streams:
                    os.close(descriptor)
                descriptor = os.pidfd_open(pid)
                running[descriptor] = (pid, client)
                selector.register(descriptor, selectors.EVENT_READ)
                client.send(str(pid).encode())
            else:
                descriptor = key.fd
                pid, client = running.pop(descriptor)
                selector.unregister(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(OSError):  # nobody waits for it any more
                    client.send(str(status).encode())
                client.close()


def kill_command(pid: int) -> None:
    """Kill a forked command; if it leads a session, its whole process group."""
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)


def become(request: dict[str, Any]) -> None:
    """Give this forked process the command line, environment, working directory and streams of a request."""
    if request["session"]:
        os.setsid()
    for number, descriptor in enumerate(request["streams"]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # anew, so that nothing of the server's buffers or modes is left; they stay open as long as the process lives
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace", buffering=1)  # noqa: SIM115
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    told = os.memfd_create(COMMAND)  # /proc shows the server's line; processes_of() reads this
    variables = [f"{key}={value}" for key, value in request["env"].items()]
    os.write(told, "\0".join([*request["argv"], *variables]).encode())
    take_command_line(request["argv"])
    os.execve = exec_here  # type: ignore[assignment]
    if request["root"] != str(warm.ROOT):
        for name in [name for name in sys.modules if name.partition(".")[0] in PROJECT]:
            del sys.modules[name]
        sys.path.insert(1, request["root"])


def take_command_line(words: list[str]) -> None:
    """Give this process the arguments, the import path and the answer to Ctrl-C that an interpreter begins with."""
    module = words[0] == "-m"
    sys.argv = words[1:] if module else words
    sys.path[0] = str(Path.cwd()) if module else str(Path(words[0]).parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def exec_here(program: str, words: list[str], env: Mapping[str, str], instead: Any = os.execve) -> None:
    """os.execve, but that a script of the project finds its imports made."""
    if program != words[0] or not warm.can_fork(words, env, Path.cwd()):
        instead(program, words, env)
    values = dict(env)
    os.environ.clear()
    os.environ.update(values)
    take_command_line(words[1:])
    leave(execute(words[1:]))


def main() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        preload()
        listener.listen(64)
        request = serve(listener)
    if request is None:
        leave(0)
        return
    become(request)
    leave(execute(request["argv"]))


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


if __name__ == "__main__":
    main()
