"""Attacks from a cluster's switch: read the packets of a cable, and connect to a rank that waits for others."""

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
from tests.harness.commands.processes import WAIT_TIMEOUT, wait_until
from tests.harness.ranks.foreign_clients import send_random_inputs

ETHERNET_HEADER_BYTES = 14
# linux/if_ether.h, linux/in.h
ETH_P_IP = 0x0800
ETH_P_ALL = 3
IPPROTO_TCP = 6
# linux/socket.h, linux/if_packet.h
SO_RCVBUFFORCE = 33
SOL_PACKET = 263
PACKET_STATISTICS = 6
BUFFER_BYTES = 256 << 20  # of packets that have not been read yet
LISTENING = "0A"  # in /proc/net/tcp


# ---- reading


def open_sniffer(cluster: Cluster, host: int) -> socket.socket:
    """Open a socket at the switch that receives all packets of a host's cable from now on."""
    ours, theirs = socket.socketpair()

    def tap() -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as sniffer:
            sniffer.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
            sniffer.bind((format_host_name(host), ETH_P_ALL))
            socket.send_fds(theirs, [b"."], [sniffer.fileno()])

    with ours, theirs:
        assert run_in_namespaces(cluster.process, tap) == 0
        return socket.socket(fileno=socket.recv_fds(ours, 1, 1)[1][0])


def read_tcp(sniffer: socket.socket, hosts: set[int]) -> bytes:
    """Return the joined TCP payloads that two hosts have sent each other; fails if a packet was missed."""
    addresses = {socket.inet_aton(format_host_address(host)) for host in hosts}
    payloads = bytearray()
    with contextlib.suppress(BlockingIOError):
        while True:
            frame = sniffer.recv(1 << 17, socket.MSG_DONTWAIT)
            (protocol,) = struct.unpack_from("!H", frame, ETHERNET_HEADER_BYTES - 2)
            packet = frame[ETHERNET_HEADER_BYTES:]
            if protocol != ETH_P_IP or packet[9] != IPPROTO_TCP:
                continue
            if {packet[12:16], packet[16:20]} == addresses:
                segment = packet[4 * (packet[0] & 15) :]
                payloads += segment[4 * (segment[12] >> 4) :]
    _, dropped = struct.unpack("II", sniffer.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
    assert dropped == 0
    return bytes(payloads)


# ---- connecting


def intrude(cluster: Cluster, foreign: Identity, seed: str) -> int:
    """Connect from the controller to the rank of host 1 while it waits for that of host 2; return 0 on success.

    The switch separates the hosts until every intruder has been refused. Other intruders are connected when the ranks
    connect to each other.
    """

    def connect_and_stay() -> None:
        os.environ["PATH"] = make_search_path()  # contains ip
        separate_hosts("on")
        try:
            port = wait_until(lambda: find_port(cluster.plan, 1), "a rank listens", 100, pause=0.01)
            address = (format_host_address(1), port)
            check_refused(address, foreign, seed)
        finally:
            separate_hosts("off")
        intruders = []
        with contextlib.suppress(ConnectionRefusedError):  # the ranks are connected: the port is closed
            while True:
                intruders.append(connect(address, make_client_hello()))
                time.sleep(0.01)
        assert intruders, "no intruder was connected when the ranks connected"
        assert all(map(is_closed, intruders))

    return run_in_namespaces(cluster.process, connect_and_stay)


def separate_hosts(switch: str) -> None:
    """Let the switch carry packets only between each host and the controller ("on"), or between all ("off")."""
    run_ip(*(f"link set {name} type bridge_slave isolated {switch}" for name in read_cable_states()))


def find_port(plan: Plan, host: int) -> int:
    """Return the port at which a rank listens on a host's address, or 0 if there is none."""
    pid = daemons.find_running_host_process(plan, host).pid
    host_address = socket.inet_aton(format_host_address(host))[::-1].hex().upper()
    with open(f"/proc/{pid}/net/tcp") as table:
        rows = [line.split() for line in table]
    for row in rows:
        address, _, port = row[1].partition(":")
        if row[3] == LISTENING and address == host_address:
            return int(port, 16)
    return 0


def check_refused(address: tuple[str, int], foreign: Identity, seed: str) -> None:
    """Check that a rank refuses all intruders, and closes the connections of those who send no more."""
    hello = make_client_hello()
    silent = [connect(address, data) for data in (b"", hello[:50], hello)]
    send_random_inputs(RankAddress(*address, "", "", ""), 60, seed)
    without_certificate = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    without_certificate.check_hostname = False
    for context in (without_certificate, foreign.client):
        context.verify_mode = ssl.CERT_NONE  # the intruder accepts any rank
        with contextlib.suppress(OSError), context.wrap_socket(connect(address)) as intruder:
            intruder.sendall(make_hello(ConnectionId("run", 1, 0), b"guess"))
            assert not intruder.recv(1)
    assert all(map(is_closed, silent))


def connect(address: tuple[str, int], data: bytes = b"") -> socket.socket:
    """Open a connection and send data."""
    intruder = socket.create_connection(address, timeout=WAIT_TIMEOUT)
    intruder.sendall(data)
    return intruder


def is_closed(intruder: socket.socket) -> bool:
    """Read until the other end closes the connection."""
    with contextlib.suppress(ConnectionResetError):
        while intruder.recv(1 << 16):
            pass
    return True


def make_client_hello() -> bytes:
    """Return the first message of a TLS client."""
    context = ssl.create_default_context()
    message = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), message, server_hostname="rank").do_handshake()
    return message.read()
