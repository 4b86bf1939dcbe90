"""A process that has imported torch and the project once, and forks for each command that a test starts.

    python -m tests.harness.warm_server SOCKET      started by tests/harness/warm.py

A request is one message with the command line, the environment, the working directory and three file descriptors.
The answers are the pid, and at the end the wait status. A forked command runs as a script or module of its own
process would: as `__main__`, with its own signals, streams, exit hooks and exit status. The server ends when its stdin
closes, as it does when pytest is killed, and the commands that still run end with it. It has one thread only, as a fork
would lose the others: it uses neither autograd nor OpenMP, and its OpenBLAS has no threads.
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

from tests.harness.warm_command import become, execute, leave

HUGE, MADV_COLLAPSE = 1 << 21, 25  # bytes of a huge page; the number of the advice in Linux's mman.h
LARGEST = 1 << 18  # bytes of a request
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
    "wandb",
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


def main() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        preload()
        listener.listen(64)
        request = serve(listener)
    if request is None:
        leave(0)
        return
    words, env, cwd, root = request["argv"], request["env"], Path(request["cwd"]), Path(request["root"])
    become(words, env, cwd, request["streams"], root, session=request["session"])
    leave(execute(words))


if __name__ == "__main__":
    main()
