"""Start the project's commands without their imports: forks of a process that has made them (warm_server.py).

Status, output and run folder are those of a real process (tests/complete/test_warm.py). A command is a real process
where that is the point: where variables are set that count when an interpreter or a library starts, and outside of the
project's own folder, unless PYTHONPATH says which sources are executed there.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
EARLY = (
    *("OMP_", "GOMP_", "MKL_", "KMP_", "OPENBLAS_", "MALLOC_", "GLIBC_", "LD_"),
    *("PYTHON", "TORCH", "COVERAGE_", "FAKETIME"),
)
SHARED = "WARM_SERVER"  # the variable with the socket of the server that pytest has started for its workers
OURS = ("common", "slurm")  # packages with modules that are executed
REAL = "WARM_REAL"  # the variable of a command that starts none but real processes
OWN = "TORCHINDUCTOR_CACHE_DIR"  # torch's compiler sets it in the process that imports it, such as this one


class Server:
    """The one server of pytest and its workers: started by pytest before them, or here when it is first needed."""

    _path = os.environ.get(SHARED, "")
    _process: subprocess.Popen[bytes] | None = None
    _early: dict[str, str] | None = None

    @classmethod
    def start(cls) -> None:
        """Start a server; the processes that this one starts find it, too."""
        os.environ[SHARED] = cls._path = str(Path(tempfile.mkdtemp(prefix="warm-")) / "socket")
        argv = [sys.executable, "-m", "tests.harness.warm_server", cls._path]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
        cls._process = subprocess.Popen(argv, cwd=ROOT, env=environ, stdin=subprocess.PIPE, start_new_session=True)
        atexit.register(cls._end)

    @classmethod
    def connect(cls) -> socket.socket:
        """Connect to the server as soon as it has made its imports."""
        if not cls._path:
            cls.start()
        if cls._early is None:
            cls._early = early_variables(os.environ)
        while True:
            client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                client.connect(cls._path)
                return client
            except (ConnectionRefusedError, FileNotFoundError):
                client.close()
                if cls._process is not None and cls._process.poll() is not None:
                    raise RuntimeError(f"the warm server ended: exit status {cls._process.returncode}") from None
                time.sleep(0.02)

    @classmethod
    def early(cls) -> dict[str, str]:
        """The variables that count at a start, as the server has them or would have them."""
        return early_variables(os.environ, find_sources(os.environ)) if cls._early is None else cls._early

    @classmethod
    def _end(cls) -> None:
        assert cls._process and cls._process.stdin
        cls._process.stdin.close()
        cls._process.wait(20)
        Path(cls._path).unlink(missing_ok=True)
        Path(cls._path).parent.rmdir()


class Command:
    """A command that runs: real or forked. Its output goes to files, so that nothing waits for a reader."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path = ROOT,
        session: bool = False,
        real: bool = False,
        root: Path = ROOT,
    ) -> None:
        """`root` is the checkout whose sources are executed; those of a copy are imported anew, torch is not."""
        self.argv = list(argv)
        self._out, self._err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 (closed with this object)
        self._client: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.returncode: int | None = None
        if real or not can_fork(argv, env, cwd, root):
            self._process = subprocess.Popen(
                argv,
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
                start_new_session=session,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 (a shell's & ignores it)
            )
            self.pid = self._process.pid
            return
        request = {"argv": list(argv[1:]), "env": dict(env), "session": session, "cwd": str(cwd), "root": str(root)}
        self._client = Server.connect()
        with open(os.devnull) as nothing:
            streams = [nothing.fileno(), self._out.fileno(), self._err.fileno()]
            socket.send_fds(self._client, [json.dumps(request).encode()], streams)
            self.pid = int(self._client.recv(100))

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; returns the exit status, negative for a signal. Raises subprocess.TimeoutExpired."""
        if self.returncode is None and self._process is not None:
            self.returncode = self._process.wait(timeout)
        elif self.returncode is None:
            assert self._client
            self._client.settimeout(timeout)
            try:
                self.returncode = os.waitstatus_to_exitcode(int(self._client.recv(100)))
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.argv, timeout or 0, self.out, self.err) from None
            self._client.close()
        assert self.returncode is not None
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.001)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    @property
    def out(self) -> str:
        return read(self._out)

    @property
    def err(self) -> str:
        return read(self._err)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.out, self.err


def read(file: IO[bytes]) -> str:
    """All that was written so far; the writers' position stays."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()


def find_sources(env: Mapping[str, str]) -> Path:
    """The checkout whose sources an interpreter with these variables imports: that of a run, or this one."""
    return Path(env["PYTHONPATH"]) if env.get("PYTHONSAFEPATH") and env.get("PYTHONPATH") else ROOT


def can_fork(argv: Sequence[str], env: Mapping[str, str], cwd: Path, root: Path = ROOT) -> bool:
    """Whether a fork of the server does what a real process would."""
    if argv[0] != sys.executable or not (argv[1] == "-m" or argv[1].endswith(".py")):
        return False
    if (Path(cwd) != root and env.get("PYTHONPATH") != str(root)) or early_variables(env, root) != Server.early():
        return False
    return argv[1] == "-m" or Path(argv[1]).is_relative_to(root)


def early_variables(env: Mapping[str, str], root: Path = ROOT) -> dict[str, str]:
    """The variables that count when an interpreter or a library starts, but for those of a path that a fork takes."""
    found = {key: value for key, value in env.items() if key.startswith(EARLY) and key != OWN}
    if found.get("PYTHONPATH") == str(root):
        del found["PYTHONPATH"]
        found.pop("PYTHONSAFEPATH", None)
    return found


def execute(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path = ROOT,
    timeout: float = 120,
    real: bool = False,
    root: Path = ROOT,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as subprocess.run with captured text does."""
    command = Command(argv, env=env, cwd=cwd, session=True, real=real, root=root)
    try:
        status = command.wait(timeout)
    except BaseException:
        end_session(command.pid)
        command.wait(10)
        raise
    done = subprocess.CompletedProcess(list(argv), status, command.out, command.err)
    if check:
        done.check_returncode()
    return done


def end_session(pid: int) -> None:
    """Kill a process and what it started, and wait until they are gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    time.sleep(0.05)
