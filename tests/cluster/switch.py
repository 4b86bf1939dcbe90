"""What others at a cluster's switch can do: read what passes a cable, and connect to a rank that waits for others."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import time

from common.backend.certificates import Identity
from common.ranks.links.connecting import RankAddress
from common.ranks.links.welcome import ConnectionId, make_hello
from slurm.local_cluster import daemons
from slurm.local_cluster.cluster import Cluster
from slurm.local_cluster.namespaces import read_cable_states, run_in_namespaces, run_ip
from slurm.local_cluster.slurm_conf import Plan, format_host_address, format_host_name, make_search_path
from tests.harness.processes import PATIENCE, wait_until
from tests.harness.strangers import attack

ETHERNET, IP, TCP, ALL = 14, 0x0800, 6, 3  # bytes of a header; linux/if_ether.h, linux/in.h
FORCED_BUFFER, PACKET_LEVEL, STATISTICS = 33, 263, 6  # linux/socket.h, linux/if_packet.h
KEPT = 256 << 20  # bytes that wait until they are read
LISTENING = "0A"  # in /proc/net/tcp


# ---- reading


def open_sniffer(cluster: Cluster, host: int) -> socket.socket:
    """A socket at the switch that keeps whatever passes the cable of a host from now on."""
    ours, theirs = socket.socketpair()

    def tap() -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as sniffer:
            sniffer.setsockopt(socket.SOL_SOCKET, FORCED_BUFFER, KEPT)
            sniffer.bind((format_host_name(host), ALL))
            socket.send_fds(theirs, [b"."], [sniffer.fileno()])

    with ours, theirs:
        assert run_in_namespaces(cluster.process, tap) == 0
        return socket.socket(fileno=socket.recv_fds(ours, 1, 1)[1][0])


def read_tcp(sniffer: socket.socket, hosts: set[int]) -> bytes:
    """What two hosts have sent each other in TCP's packets, one after the other, and none was missed."""
    ends = {socket.inet_aton(format_host_address(host)) for host in hosts}
    found = bytearray()
    with contextlib.suppress(BlockingIOError):
        while True:
            frame = sniffer.recv(1 << 17, socket.MSG_DONTWAIT)
            (kind,) = struct.unpack_from("!H", frame, ETHERNET - 2)
            packet = frame[ETHERNET:]
            if kind == IP and packet[9] == TCP and {packet[12:16], packet[16:20]} == ends:
                segment = packet[4 * (packet[0] & 15) :]
                found += segment[4 * (segment[12] >> 4) :]
    assert struct.unpack("II", sniffer.getsockopt(PACKET_LEVEL, STATISTICS, 8))[1] == 0
    return bytes(found)


# ---- connecting


def intrude(cluster: Cluster, foreign: Identity, seed: str) -> int:
    """Connect from the controller to the rank of host 1 while it waits for that of host 2; returns 0 if all went well.

    The switch keeps the hosts apart until every stranger has been refused; others are there when the ranks connect.
    """

    def connect_and_stay() -> None:
        os.environ["PATH"] = make_search_path()  # ip is an administrators' program
        separate_hosts("on")
        try:
            port = wait_until(lambda: find_port(cluster.plan, 1), "a rank listens", 100, pause=0.01)
            address = format_host_address(1), port
            be_refused(address, foreign, seed)
        finally:
            separate_hosts("off")
        held = []
        with contextlib.suppress(ConnectionRefusedError):  # the ranks are connected: the port is closed
            while True:
                held.append(connect(address, make_client_hello()))
                time.sleep(0.01)
        assert held, "nobody was there when the ranks connected"
        assert all(map(is_closed, held))

    return run_in_namespaces(cluster.process, connect_and_stay)


def separate_hosts(switch: str) -> None:
    """Let the switch carry packets between each host and the controller only, or again between all."""
    run_ip(*(f"link set {name} type bridge_slave isolated {switch}" for name in read_cable_states()))


def find_port(plan: Plan, host: int) -> int:
    """The port at which a rank listens on a host's address, which a scan would find; 0 if there is none."""
    pid = daemons.find_running_host_process(plan, host).pid
    own = socket.inet_aton(format_host_address(host))[::-1].hex().upper()
    with open(f"/proc/{pid}/net/tcp") as table:
        rows = [line.split() for line in table]
    ends = [row[1].split(":") for row in rows if row[3] == LISTENING]
    return next((int(port, 16) for address, port in ends if address == own), 0)


def be_refused(address: tuple[str, int], foreign: Identity, seed: str) -> None:
    """Try all ways to get in; those who then say no more are closed by the rank, too."""
    hello = make_client_hello()
    quiet = [connect(address, data) for data in (b"", hello[:50], hello)]
    attack(RankAddress(*address, "", "", ""), 60, seed)
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    for context in (bare, foreign.client):
        context.verify_mode = ssl.CERT_NONE  # whoever this rank may be
        with contextlib.suppress(OSError), context.wrap_socket(connect(address)) as stranger:
            stranger.sendall(make_hello(ConnectionId("run", 1, 0), b"guess"))
            assert not stranger.recv(1)
    assert all(map(is_closed, quiet))


def connect(address: tuple[str, int], data: bytes = b"") -> socket.socket:
    """A connection on which something has been said."""
    stranger = socket.create_connection(address, timeout=PATIENCE)
    stranger.sendall(data)
    return stranger


def is_closed(stranger: socket.socket) -> bool:
    """Read until the other end closes, which lasts until it does."""
    with contextlib.suppress(ConnectionResetError):
        while stranger.recv(1 << 16):
            pass
    return True


def make_client_hello() -> bytes:
    """What a TLS client says first."""
    context, said = ssl.create_default_context(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), said, server_hostname="rank").do_handshake()
    return said.read()
