"""A process that imports torch and the project once, and forks for each command of a test.

    python -m tests.harness.commands.fork_server SOCKET      started by tests/harness/commands/execution.py

A request is one message with the command line, the environment, the working directory and three file descriptors.
The answers are the process ID and, after the command has exited, its wait status. A forked command runs like a script
or module in a new process: as `__main__`, with separate signals, streams, exit hooks and exit status. When the stdin of
the server closes, for example because pytest was killed, the server kills all running commands and exits. It has only
one thread, because a fork would lose others: it uses neither autograd nor OpenMP, and its OpenBLAS has no threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import selectors
import signal
import socket
import sys
import weakref
from pathlib import Path
from typing import Any

from tests.harness.commands.forked_process import execute_as_main, exit_process, set_up_process

HUGE_PAGE_BYTES = 1 << 21
MADV_COLLAPSE = 25  # of Linux's mman.h
MAX_REQUEST_BYTES = 1 << 18
# modules that experiments import inside functions, each in 0.2 to 2 s
LAZY_MODULES = (
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
    "wandb",
)


def preload() -> None:
    """Import the project and its dependencies, without executing anything else."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's OpenBLAS would start threads when it is imported
    from common.system.imports import import_without_garbage_collection

    with import_without_garbage_collection():
        import common
        import configs
        import experiments
        import slurm

        for package in (configs, common, slurm, experiments):
            for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
                if not module.name.endswith("__main__"):
                    importlib.import_module(module.name)
        for name in LAZY_MODULES:
            importlib.import_module(name)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # those of torch destroy operator libraries and write to 30 MB of memory
    gc.unfreeze()  # otherwise, the garbage of the imports would not be collected
    gc.collect()
    gc.freeze()  # memory stays shared with the forked commands if nothing writes to it
    use_huge_pages()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lose threads"


def use_huge_pages() -> None:
    """Move this process's memory into huge pages, if the kernel can: a fork copies an entry per page.

    This reduces the time of a fork and of an exit with 400 MB of imports to a fifth (MADV_COLLAPSE, Linux 6.1).
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *name = line.split()
        if "w" in access and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            begin = (begin + HUGE_PAGE_BYTES - 1) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            end = end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            if begin < end:
                advise(begin, end - begin, MADV_COLLAPSE)


def serve_requests(listener: socket.socket) -> dict[str, Any] | None:
    """Answer requests until stdin closes, then return None. In a forked process, return its request."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    running: dict[int, tuple[int, socket.socket]] = {}  # pid and client, by the file descriptor of the process
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                for pid, _ in running.values():
                    kill_command(pid)
                return None
            if key.fileobj is listener:
                client, _ = listener.accept()
                text, streams, _, _ = socket.recv_fds(client, MAX_REQUEST_BYTES, 3)
                if not text:  # the client has closed the connection
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
                with contextlib.suppress(OSError):  # the client no longer waits
                    client.send(str(status).encode())
                client.close()


def kill_command(pid: int) -> None:
    """Kill a forked command; if it leads a session, its whole process group."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        preload()
        listener.listen(64)
        request = serve_requests(listener)
    if request is None:
        exit_process(0)
        return
    arguments = request["argv"]
    cwd = Path(request["cwd"])
    root = Path(request["root"])
    set_up_process(arguments, request["env"], cwd, request["streams"], root, new_session=request["session"])
    exit_process(execute_as_main(arguments))


if __name__ == "__main__":
    main()
