"""Names, interfaces and ports by which ranks find the first one, with real sockets on this host."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator

import pytest

from common.system import network
from common.system.errors import UnreachableError, UserError


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A program that listens on some port of this host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def find_closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_host_that_answers_is_told_from_one_that_does_not(listener: socket.socket) -> None:
    class Absent(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, *words: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Absent) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert network.explain_unreachable_url(f"http://127.0.0.1:{server.server_port}", 5) == "", "a 404 is an answer"
    assert "refused" in network.explain_unreachable_url(f"http://127.0.0.1:{find_closed_port()}", 5)
    assert network.explain_unreachable_url(
        f"http://127.0.0.1:{listener.getsockname()[1]}", 0.1
    )  # accepts, and says nothing


def test_interfaces_are_found_by_address() -> None:
    assert network.list_interfaces()["lo"] == "127.0.0.1"
    assert network.find_interface("127.0.0.1") == "lo"
    assert network.resolve_ipv4("localhost") == "127.0.0.1"
    assert network.check_interface("lo") == "lo"
    with pytest.raises(UserError, match=r"launch.interface=eth99 does not exist on .*; use one of: lo \(127.0.0.1\)"):
        network.check_interface("eth99")


def test_ports_follow_from_the_attempt_alone() -> None:
    ports = network.derive_ports("40017.0.0")
    assert ports == network.derive_ports("40017.0.0") and len(set(ports)) == 8
    assert not set(ports) & set(network.derive_ports("40017.0.1"))
    assert all(port in network.PORTS for port in ports)


def test_the_first_free_port_is_served(listener: socket.socket) -> None:
    def serve(port: int) -> int:
        with socket.create_server(("127.0.0.1", port)):
            return port

    taken, free = listener.getsockname()[1], find_closed_port()
    assert network.serve_on_free_port([taken, free], serve) == free
    with pytest.raises(UserError, match=r"is free on .*; start the run again"):
        network.serve_on_free_port([taken], serve)


def test_rank_0_is_looked_for_on_every_port(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    assert network.connect_to_rank0("localhost", [find_closed_port(), port], lambda port: port, 5) == port


def test_what_keeps_a_rank_from_rank_0_is_told(listener: socket.socket) -> None:
    closed, foreign = find_closed_port(), listener.getsockname()[1]
    with pytest.raises(UnreachableError, match=r"rank 0 on localhost \(address 127.0.0.1, interface lo, .*refused"):
        network.connect_to_rank0("localhost", [closed], lambda port: port, 0.1)
    with pytest.raises(UnreachableError, match=f"port {foreign} is used by another program; check the host name"):
        network.connect_to_rank0("localhost", [foreign], lambda port: None, 0.1)
    with pytest.raises(UnreachableError, match=r"address \?, interface none"):
        network.connect_to_rank0("no-such-host.invalid", [closed], lambda port: port, 0.1)
