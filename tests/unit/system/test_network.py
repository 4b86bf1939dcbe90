"""The host names, interfaces and ports with which ranks find rank 0, with real sockets on this host."""

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
    """The socket of a program that listens on a port of this host and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def used_port(listener: socket.socket) -> int:
    """The port of the listener."""
    return int(listener.getsockname()[1])


@pytest.fixture
def closed_port() -> int:
    """A port on which no program listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class NotFoundHandler(http.server.BaseHTTPRequestHandler):
    """A web server without pages."""

    def do_HEAD(self) -> None:
        self.send_error(404)

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_url_that_answers_with_an_error_is_reachable() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), NotFoundHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert network.explain_unreachable_url(url, 5) == ""


def test_a_url_without_an_answer_is_unreachable(used_port: int, closed_port: int) -> None:
    assert "refused" in network.explain_unreachable_url(f"http://127.0.0.1:{closed_port}", 5)
    assert network.explain_unreachable_url(f"http://127.0.0.1:{used_port}", 0.1)


def test_interfaces_are_found_by_address() -> None:
    assert network.list_interfaces()["lo"] == "127.0.0.1"
    assert network.find_interface("127.0.0.1") == "lo"
    assert network.resolve_ipv4("localhost") == "127.0.0.1"


def test_a_missing_interface_is_refused_with_the_existing_ones() -> None:
    assert network.check_interface("lo") == "lo"
    with pytest.raises(UserError, match=r"launch.interface=eth99 does not exist on .*; use one of: lo \(127.0.0.1\)"):
        network.check_interface("eth99")


def test_ports_depend_on_the_attempt_only() -> None:
    ports = network.derive_ports("40017.0.0")
    assert ports == network.derive_ports("40017.0.0")
    assert len(set(ports)) == 8
    assert set(ports).isdisjoint(network.derive_ports("40017.0.1"))
    assert all(port in network.PORTS for port in ports)


def test_the_first_free_port_is_served(used_port: int, closed_port: int) -> None:
    def serve(port: int) -> int:
        with socket.create_server(("127.0.0.1", port)):
            return port

    assert network.serve_on_free_port([used_port, closed_port], serve) == closed_port
    with pytest.raises(UserError, match=r"is free on .*; start the run again"):
        network.serve_on_free_port([used_port], serve)


def test_rank_0_is_searched_on_every_port(used_port: int, closed_port: int) -> None:
    port = network.connect_to_rank0("localhost", [closed_port, used_port], lambda port: port, 5)
    assert port == used_port


def test_the_reason_why_rank_0_is_unreachable_is_reported(used_port: int, closed_port: int) -> None:
    with pytest.raises(UnreachableError, match=r"rank 0 on localhost \(address 127.0.0.1, interface lo, .*refused"):
        network.connect_to_rank0("localhost", [closed_port], lambda port: port, 0.1)
    with pytest.raises(UnreachableError, match=f"port {used_port} is used by another program; check the host name"):
        network.connect_to_rank0("localhost", [used_port], lambda port: None, 0.1)
    with pytest.raises(UnreachableError, match=r"address \?, interface none"):
        network.connect_to_rank0("no-such-host.invalid", [closed_port], lambda port: port, 0.1)
