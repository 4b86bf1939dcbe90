"""Execute commands of the project as forks of the fork server (fork_server.py), which has executed their imports.

Exit status, output and run folder are those of a real process (tests/complete/test_fork_server.py). A command is
executed as a real process in two cases: its environment differs in variables that are read when an interpreter or a
library starts, or its folder is outside of the project and PYTHONPATH does not name the sources to execute.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.harness.commands.exit_status import check_status
from tests.harness.repository import ROOT

STARTUP_VARIABLE_PREFIXES = (  # of variables that are read when an interpreter or a library starts
    "OMP_", "GOMP_", "MKL_", "KMP_", "OPENBLAS_", "MALLOC_", "GLIBC_", "LD_",
    "PYTHON", "TORCH", "COVERAGE_", "FAKETIME",
)  # fmt: skip
SOCKET_VARIABLE = "FORK_SERVER_SOCKET"  # path of the socket of the server that pytest has started for its workers
COMMAND_PACKAGES = ("common", "slurm")  # packages with modules that are executed as commands
NO_FORK_VARIABLE = "FORK_SERVER_DISABLED"  # set for a command whose child processes must all be real ones
INDUCTOR_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # set by torch's compiler in each process that imports it
SERVER_START_TIMEOUT = 120.0  # seconds
KILL_TIMEOUT = 30.0  # seconds


class ForkServer:
    """The fork server of pytest and its workers.

    pytest starts it before the workers. Without workers, the first command starts it.
    """

    _path = os.environ.get(SOCKET_VARIABLE, "")
    _process: subprocess.Popen[bytes] | None = None
    _start_variables: dict[str, str] | None = None

    @classmethod
    def start(cls) -> None:
        """Start a server for this process and its child processes."""
        folder = Path(tempfile.mkdtemp(prefix="fork-server-"))
        cls._path = str(folder / "socket")
        os.environ[SOCKET_VARIABLE] = cls._path
        argv = [sys.executable, "-m", "tests.harness.commands.fork_server", cls._path]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
        cls._process = subprocess.Popen(argv, cwd=ROOT, env=environ, stdin=subprocess.PIPE, start_new_session=True)
        atexit.register(cls._end)

    @classmethod
    def connect(cls) -> socket.socket:
        """Connect to the server after it has executed its imports. Raises RuntimeError if it does not answer."""
        if not cls._path:
            cls.start()
        if cls._start_variables is None:
            cls._start_variables = select_startup_variables(os.environ)
        deadline = time.monotonic() + SERVER_START_TIMEOUT
        while True:
            client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                client.connect(cls._path)
                return client
            except (ConnectionRefusedError, FileNotFoundError):
                client.close()
                if cls._process is not None and cls._process.poll() is not None:
                    raise RuntimeError(f"the fork server exited: exit status {cls._process.returncode}") from None
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no answer from the fork server for {SERVER_START_TIMEOUT:g} s") from None
                time.sleep(0.02)

    @classmethod
    def get_start_variables(cls) -> dict[str, str]:
        """Return the variables that were read at the start of the server, or would be read at its start."""
        if cls._start_variables is None:
            source_root = find_source_root(os.environ)
            return select_startup_variables(os.environ, source_root)
        return cls._start_variables

    @classmethod
    def _end(cls) -> None:
        assert cls._process
        assert cls._process.stdin
        cls._process.stdin.close()
        cls._process.wait(20)
        Path(cls._path).unlink(missing_ok=True)
        Path(cls._path).parent.rmdir()


class Command:
    """A started command, real or forked. Its output goes to files, so that it never waits for a reader."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path = ROOT,
        new_session: bool = False,
        real_process: bool = False,
        root: Path = ROOT,
    ) -> None:
        """Start the command. `root` is the checkout with the sources; those of a copy are imported again."""
        self.argv = list(argv)
        self._stdout_file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with this object)
        self._stderr_file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with this object)
        self._client: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.returncode: int | None = None
        if real_process or not can_fork(argv, env, cwd, root):
            self._start_process(env, cwd, new_session)
            return
        request: dict[str, Any] = {"argv": list(argv[1:])}
        request["env"] = dict(env)
        request["session"] = new_session
        request["cwd"] = str(cwd)
        request["root"] = str(root)
        self._start_fork(request)

    def _start_process(self, env: Mapping[str, str], cwd: Path, new_session: bool) -> None:
        self._process = subprocess.Popen(
            self.argv,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=self._stdout_file,
            stderr=self._stderr_file,
            start_new_session=new_session,
            preexec_fn=receive_interrupts,  # noqa: PLW1509 (Popen has no option for this)
        )
        self.pid = self._process.pid

    def _start_fork(self, request: Mapping[str, Any]) -> None:
        """Send a request to the fork server. The answer is the process ID."""
        message = json.dumps(request).encode()
        self._client = ForkServer.connect()
        with open(os.devnull) as null_file:
            streams = [null_file.fileno(), self._stdout_file.fileno(), self._stderr_file.fileno()]
            socket.send_fds(self._client, [message], streams)
            self.pid = int(self._client.recv(100))

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status, negative for a signal. Raises subprocess.TimeoutExpired."""
        if self.returncode is None and self._process is not None:
            self.returncode = self._process.wait(timeout)
        elif self.returncode is None:
            assert self._client
            self._client.settimeout(timeout)
            try:
                self.returncode = os.waitstatus_to_exitcode(int(self._client.recv(100)))
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.argv, timeout or 0, self.stdout, self.stderr) from None
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
    def stdout(self) -> str:
        return read_from_start(self._stdout_file)

    @property
    def stderr(self) -> str:
        return read_from_start(self._stderr_file)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.stdout, self.stderr


def receive_interrupts() -> None:
    """Undo that a shell ignores SIGINT in commands that end with `&`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_from_start(file: IO[bytes]) -> str:
    """Return the content of a file without moving its position."""
    descriptor = file.fileno()
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, 0).decode()


def find_source_root(env: Mapping[str, str]) -> Path:
    """Return the checkout that an interpreter with these variables imports: the copy in a run, or this one."""
    has_copy = env.get("PYTHONSAFEPATH") and env.get("PYTHONPATH")
    return Path(env["PYTHONPATH"]) if has_copy else ROOT


def can_fork(argv: Sequence[str], env: Mapping[str, str], cwd: Path, root: Path = ROOT) -> bool:
    """Return whether a fork of the server is equivalent to a real process."""
    if argv[0] != sys.executable:
        return False
    is_module = argv[1] == "-m"
    if not is_module and not argv[1].endswith(".py"):
        return False
    if Path(cwd) != root and env.get("PYTHONPATH") != str(root):
        return False
    if select_startup_variables(env, root) != ForkServer.get_start_variables():
        return False
    return is_module or Path(argv[1]).is_relative_to(root)


def select_startup_variables(env: Mapping[str, str], root: Path = ROOT) -> dict[str, str]:
    """Return variables that are read when an interpreter or a library starts, without the import path of `root`."""
    variables = {}
    for name, value in env.items():
        if name.startswith(STARTUP_VARIABLE_PREFIXES):
            variables[name] = value
    variables.pop(INDUCTOR_CACHE_VARIABLE, None)
    if variables.get("PYTHONPATH") == str(root):
        del variables["PYTHONPATH"]
        variables.pop("PYTHONSAFEPATH", None)
    return variables


def execute_command(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path = ROOT,
    timeout: float = 120,
    real_process: bool = False,
    root: Path = ROOT,
    status: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, like subprocess.run with captured text, and check its exit status, if not None."""
    command = Command(argv, env=env, cwd=cwd, new_session=True, real_process=real_process, root=root)
    try:
        returncode = command.wait(timeout)
    except BaseException:
        kill_session(command.pid)
        command.wait(10)
        raise
    completed = subprocess.CompletedProcess(list(argv), returncode, command.stdout, command.stderr)
    check_status(completed, status)
    return completed


@contextlib.contextmanager
def start_command(argv: Sequence[str], *, env: Mapping[str, str], real_process: bool = False) -> Iterator[Command]:
    """Start a command in a new session. Kill its process group after the block."""
    command = Command(argv, env=env, new_session=True, real_process=real_process)
    try:
        yield command
    finally:
        kill_session(command.pid)
        command.wait(60)


def kill_session(pid: int) -> None:
    """Kill the process group of a process, and wait until its processes have exited."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_TIMEOUT
    while has_running_process(pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process group {pid} still runs {KILL_TIMEOUT:g} s after SIGKILL")
        time.sleep(0.01)


def has_running_process(group: int) -> bool:
    """Return whether a process group has a process that is no zombie."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has exited
            state, _, process_group, *_ = file.read_text().rpartition(")")[2].split()
            if int(process_group) == group and state not in "ZX":
                return True
    return False
