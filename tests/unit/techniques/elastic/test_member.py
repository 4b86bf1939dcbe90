"""Member of an elastic run in its own process: a lost connection to the coordinator."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

from common.ranks.rank_info import ORPHAN_COMMAND_VARIABLE
from tests.harness.commands.processes import make_environment
from tests.harness.repository import ROOT

PROGRAM = """
import socket, sys, time
from common.techniques.elastic.member import Member
member = Member(sys.argv[1], 0, 1.5, "", joins=False)
print(member.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), flush=True)
time.sleep(60)
"""


def test_a_rank_that_cannot_reach_its_coordinator_executes_the_command_for_orphans() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", PROGRAM, f"127.0.0.1:{listener.getsockname()[1]}"]
        env = make_environment(**{ORPHAN_COMMAND_VARIABLE: json.dumps(["echo", "orphaned"])})
        with subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as rank:
            assert rank.stdout
            connection, _ = listener.accept()
            assert rank.stdout.readline() == "1500\n", "milliseconds until a lost host is noticed"
            connection.close()
            output, _ = rank.communicate(timeout=30)
            assert output == "orphaned\n"
    assert rank.returncode == 0
