"""The coordinator of an elastic run, asked by real connections."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from common.ranks.rank_info import ORPHAN_COMMAND_VARIABLE
from common.techniques.elastic.coordinator import EndReason
from common.techniques.elastic.member import Generation, GenerationEnded, Member
from common.techniques.elastic.supervisor import Supervisor
from configs.dataparallel import Elastic
from tests.harness.processes import environment, wait_until
from tests.harness.warm import ROOT


class Rank(Member):
    """A member that notes that it has to leave, where a real one ends its process."""

    left = ""

    def _end_process(self, reason: str, command: Sequence[str] = (), *, lost: bool = False) -> None:
        self.left = reason


class Run:
    """A coordinator and its supervisor in a thread, and its members."""

    def __init__(
        self, path: Path, ranks: int, needed: int = 0, late: int = 0, start_timeout: float = 60, **settings: float
    ) -> None:
        """Without the last `late` ranks, which have not come."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        self.path, self.ended = str(path), threading.Event()
        self.silent, self.started, self.dead = list[int](), list[int](), set[int]()
        elastic = Elastic(on=True, **settings)  # type: ignore[arg-type]
        self.supervisor = Supervisor(
            *(listener, ranks, elastic, self.silent.append, self.started.append, "secret", start_timeout)
        )
        self.coordinator = self.supervisor.coordinator
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()
        self.members = [self.join(rank, irreplaceable=rank < needed) for rank in range(ranks - late)]
        wait_until(lambda: len(self.coordinator.connected_ranks) == ranks - late, "all ranks")

    def serve(self) -> None:
        while not self.ended.is_set():
            self.supervisor.poll_and_restart_ranks(self.dead)
        self.coordinator.close()

    def join(self, rank: int, *, joins: bool = False, irreplaceable: bool = False) -> Rank:
        timeout = self.coordinator.settings.timeout
        return Rank(self.path, rank, timeout, "secret", joins=joins, irreplaceable=irreplaceable)

    def kill(self, rank: int) -> None:
        self.dead.add(rank)
        self.members[rank].closed = True
        self.members[rank].socket.shutdown(socket.SHUT_RDWR)

    def sign_in(self, together: bool = False, **progress: int) -> dict[str, Generation]:
        """Sign in ranks, named r0 and so on, with the steps they have done, all at once; what each is told."""
        found: dict[str, Generation] = {}

        def ask(name: str, step: int) -> None:
            found[name] = self.members[int(name[1:])].sign_in([step, 0, 1], together=together)

        threads = [threading.Thread(target=ask, args=item, daemon=True) for item in progress.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return found


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "coordinator"
    for run in RUNS:
        run.ended.set()
        run.thread.join()
    RUNS.clear()


RUNS: list[Run] = []


def begin(path: Path, ranks: int, needed: int = 0, late: int = 0, **settings: float) -> Run:
    RUNS.append(Run(path, ranks, needed, late, **settings))
    return RUNS[-1]


def test_the_state_of_a_generation_is_that_of_a_rank_that_has_done_most(path: Path) -> None:
    run = begin(path, 4)
    run.kill(1)
    wait_until(lambda: run.members[0].generation_ended and run.members[3].generation_ended, "word of the loss")
    found = run.sign_in(r0=7, r2=8, r3=7)
    assert {(*one.members, one.source, one.copies, one.number) for one in found.values()} == {(0, 2, 3, 1, True, 2)}
    assert found["r0"].lost == [1] and not run.members[0].generation_ended


def test_a_loss_while_a_generation_forms_forms_another_one(path: Path) -> None:
    """Those who wait for the lost rank's address are told, too."""
    run = begin(path, 3)
    run.kill(0)
    run.sign_in(r1=3, r2=3)
    run.members[1].set_value("1", "address")
    assert run.members[1].get_values(["1"]) == ["address"]
    run.kill(2)
    with pytest.raises(GenerationEnded):
        run.members[1].get_values(["2"])
    assert run.sign_in(r1=3)["r1"] == Generation(3, [1], 0, False, [2], [], False)


def test_a_rank_that_comes_late_belongs_to_no_generation(path: Path) -> None:
    """A frozen one that wakes is told to leave, whatever it wants."""
    run = begin(path, 2, timeout=0.3)
    frozen = run.members[1]
    frozen.heartbeat_seconds = 3600
    wait_until(lambda: run.silent == [1], "silence")
    assert run.sign_in(r0=5)["r0"].members == [0]
    wait_until(lambda: "declared this rank lost" in frozen.left, "it leaves")


def test_a_rank_joins_with_nothing_and_gets_all(path: Path) -> None:
    """The others learn that it waits, and leave together when all know: their generation goes on until then."""
    run = begin(path, 2)
    run.kill(1)
    run.sign_in(r0=5)
    run.members[1] = run.join(1, joins=True)
    assert not run.members[0].generation_ended
    found: dict[str, Generation] = {}
    joining = threading.Thread(target=lambda: found.update(run.sign_in(r1=-1)), daemon=True)
    joining.start()
    wait_until(lambda: run.members[0].has_waiting_rank, "word that one joins")
    assert not run.members[0].generation_ended
    found |= run.sign_in(True, r0=6)
    joining.join(30)
    assert found["r0"] == found["r1"] == Generation(3, [0, 1], 0, True, [], [1], False)


def test_without_a_rank_that_has_the_state_the_run_is_over(path: Path) -> None:
    """The rank that joined belongs to a generation, and its copy of the state was never complete."""
    run = begin(path, 3)
    run.kill(1)
    run.kill(2)
    assert run.sign_in(r0=5)["r0"].members == [0]
    run.members[1] = run.join(1, joins=True)
    found: dict[str, Generation] = {}
    joining = threading.Thread(target=lambda: found.update(run.sign_in(r1=-1)), daemon=True)
    joining.start()
    wait_until(lambda: run.members[0].has_waiting_rank, "word that one joins")
    found |= run.sign_in(True, r0=6)
    joining.join(30)
    assert found["r1"].members == [0, 1] and found["r1"].source == 0
    run.kill(0)
    threading.Thread(target=run.sign_in, kwargs={"r1": -1}, daemon=True).start()
    wait_until(lambda: run.coordinator.end_reason, "the loss of the state")
    assert (
        run.coordinator.end_reason is EndReason.STATE_LOST and run.coordinator.generation_number == found["r1"].number
    )
    assert not run.coordinator.is_active and not run.coordinator.missing_ranks


def test_fewer_than_the_minimum_are_told_to_stop(path: Path) -> None:
    run = begin(path, 3, min=2)
    run.kill(0)
    assert not run.sign_in(r1=3, r2=3)["r1"].stops
    run.kill(1)
    assert run.sign_in(r2=3)["r2"].stops


def test_without_an_irreplaceable_rank_the_run_is_over(path: Path) -> None:
    """No generation is formed of the others, and nobody is started again: the launcher ends them."""
    run = begin(path, 4, needed=2)
    run.kill(3)
    assert run.sign_in(r0=3, r1=3, r2=3)["r1"].members == [0, 1, 2]
    wait_until(lambda: run.started == [3], "rank 3 starts")
    run.kill(1)
    wait_until(lambda: run.coordinator.end_reason, "the loss of rank 1")
    assert not run.coordinator.is_active and not run.supervisor.handle_ended_rank(1, -9)
    for rank in (0, 2):
        threading.Thread(target=run.sign_in, kwargs={f"r{rank}": 4}, daemon=True).start()
    wait_until(lambda: sum(bool(one.sign_in) for one in run.coordinator.connections) == 2, "the others sign in")
    assert run.coordinator.generation_number == 2 and run.started == [3]


def test_the_loss_of_an_irreplaceable_rank_counts_before_all_have_come(path: Path) -> None:
    run = begin(path, 3, needed=1, late=1)
    run.kill(0)
    wait_until(lambda: run.coordinator.end_reason, "the loss of rank 0")
    run.join(2)
    assert not run.supervisor.handle_ended_rank(0, -9) and not run.coordinator.is_active


def test_a_rank_is_started_again_once_it_is_known_to_be_lost(path: Path) -> None:
    """It might have failed by itself, which ends the run."""
    run = begin(path, 3)
    run.kill(1)
    run.dead.clear()
    run.sign_in(r0=1, r2=1)
    for before in (run.coordinator.polled for _ in range(3)):
        wait_until(lambda before=before: run.coordinator.polled > before, "a look at who is missing", pause=0.001)  # type: ignore[misc]
    assert not run.started
    run.dead.add(1)
    wait_until(lambda: run.started == [1], "rank 1 starts")


def test_strangers_are_turned_away(path: Path) -> None:
    run = begin(path, 2)
    for text in (b'{"hello": 1, "key": "guess", "joins": true}\n', b"[]\n", b'{"sign_in": {}}\n', b"\xff" * (1 << 21)):
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(run.path)
            line.settimeout(30)
            try:
                line.sendall(text)
                assert line.recv(1) == b""
            except ConnectionError:
                pass
    assert not run.members[0].generation_ended and run.coordinator.members == [0, 1]


def test_a_rank_that_starts_is_not_started_twice(path: Path) -> None:
    """Another one is lost before it has joined."""
    run = begin(path, 4)
    run.kill(1)
    run.sign_in(r0=1, r2=1, r3=1)
    wait_until(lambda: run.started == [1], "rank 1 starts")
    run.kill(2)
    run.sign_in(r0=1, r3=1)
    wait_until(lambda: 2 in run.started, "rank 2 starts")
    run.members[1] = run.join(1, joins=True)
    wait_until(lambda: 1 in run.coordinator.connected_ranks, "rank 1 is there")
    assert run.started == [1, 2]


def test_a_rank_that_is_started_and_does_not_come_is_ended_and_started_again(path: Path) -> None:
    """As one that is frozen before its first message; each start counts."""
    run = begin(path, 2, start_timeout=0.05, rejoin=2)
    run.kill(1)
    run.sign_in(r0=1)
    wait_until(lambda: run.silent == [1, 1], "both new processes are ended")
    assert run.started == [1, 1] and not run.supervisor.start_times and run.coordinator.is_active


def test_a_rank_that_ends_itself_says_why(path: Path) -> None:
    """It is lost, also where its failure has made it leave orderly before."""
    run = begin(path, 2)
    run.members[1].close()
    wait_until(lambda: run.coordinator.members == [0], "rank 1 leaves")
    assert not run.members[0].generation_ended
    run.members[1]._announce_loss("a collective does not end")
    wait_until(lambda: run.members[0].generation_ended, "word of the loss")
    run.kill(1)
    assert run.sign_in(r0=1)["r0"].lost == [1]
    assert run.coordinator.reasons == {1: "ended itself: a collective does not end"}


HELLO = '"joins": false, "irreplaceable": false, "pid": 9'


@pytest.mark.parametrize(
    "sent",
    [
        b"[" * 100_000,
        b"[" * 4000 + b"\n",
        b"\xff\n",
        b"17\n",
        b'{"beat": true}\n',
        f'{{"hello": 1, "key": "other", {HELLO}}}\n'.encode(),
        f'{{"hello": 0, "key": "secret", {HELLO}}}\n'.encode(),  # which is there already
        b'{"hello": 0, "key": "secret", "joins": false, "irreplaceable": false, "pid": 1e400}\n',
    ],
    ids=["long", "deep", "no text", "a number", "no name", "another key", "a rank twice", "infinite"],
)
def test_a_stranger_is_sent_away_and_changes_nothing(path: Path, sent: bytes) -> None:
    run = begin(path, 2)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(10)
        stranger.connect(run.path)
        with contextlib.suppress(OSError):  # it is closed before all is sent
            stranger.sendall(sent)
        with contextlib.suppress(ConnectionError):
            assert not stranger.recv(1)
    run.kill(1)
    assert run.sign_in(r0=3)["r0"].members == [0]


def test_a_rank_that_cannot_reach_its_coordinator_becomes_the_command_for_that() -> None:
    source = (
        "import socket, sys, time; from common.techniques.elastic.member import Member; "
        "member = Member(sys.argv[1], 0, 1.5, '', joins=False); "
        "print(member.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), flush=True); time.sleep(60)"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        argv = [sys.executable, "-c", source, f"127.0.0.1:{listener.getsockname()[1]}"]
        env = environment(**{ORPHAN_COMMAND_VARIABLE: json.dumps(["echo", "orphaned"])})
        with subprocess.Popen(argv, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as rank:
            assert rank.stdout
            accepted, _ = listener.accept()
            assert rank.stdout.readline() == "1500\n", "a host that is gone is noticed after so many ms"
            accepted.close()
            assert rank.communicate(timeout=30)[0] == "orphaned\n"
    assert rank.returncode == 0
