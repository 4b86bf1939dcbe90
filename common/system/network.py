"""Host names, addresses, interfaces and ports for connecting to rank 0. This module does not import torch."""

from __future__ import annotations

import fcntl
import queue
import re
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from common.system.errors import UnreachableError, UserError
from common.system.text import read_text_or_empty

T = TypeVar("T")
UNREACHABLE_SECONDS = 10.0  # time limit for reaching rank 0's host, so that a job fails within 15 s
SIOCGIFADDR = 0x8915  # from linux/sockios.h
PORTS = range(20_000, 60_000)


def explain_unreachable_url(url: str, seconds: float) -> str:
    """Return why the server at `url` did not respond within `seconds`.

    Returns an empty string if the server sent any HTTP response.
    """

    def send_request() -> str:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds).close()
        except urllib.error.HTTPError:
            pass  # an error status is also a response
        except Exception as error:  # noqa: BLE001 (for example, an unknown host name)
            return str(getattr(error, "reason", None) or error)
        return ""

    # The timeout of urlopen does not limit name resolution, attempts at several addresses, or a slow response.
    problem = call_with_timeout(seconds, send_request)
    return f"no response within {seconds:g} s" if problem is None else problem


def call_with_timeout(seconds: float, function: Callable[[], T]) -> T | None:
    """Return the result of `function`, or None on timeout. Raises any exception that the function raises.

    The function runs in a daemon thread that may outlive this call, because libraries may block for longer than the
    timeout that is passed to them.
    """
    outcomes: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()

    def call() -> None:
        try:
            outcomes.put((function(), None))
        except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
            outcomes.put((None, error))

    threading.Thread(target=call, daemon=True).start()
    try:
        result, error = outcomes.get(timeout=seconds)
    except queue.Empty:
        return None
    if error is not None:
        raise error
    return result


def resolve_ipv4(host: str) -> str:
    """Return the IPv4 address of a host. Raises OSError if the host name cannot be resolved."""
    return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])


def resolve_for_other_hosts(host: str, role: str, hosts: int) -> str:
    """Return the IPv4 address at which the other hosts can reach this host. Raises UserError if no address is found.

    `host` is the name of this host, `role` describes it in messages, and `hosts` is the total number of hosts.
    """
    try:
        address = resolve_ipv4(host)
    except OSError as error:
        problem = f"{host}, {role}, cannot resolve its own name: {error}"
        raise UserError(f"{problem}; add the name to /etc/hosts or DNS") from None
    if hosts > 1 and address.startswith("127."):
        raise UserError(
            f"{host}, {role}, resolves to {address}, which other hosts cannot reach; in /etc/hosts, map the name to "
            "the address of its network interface"
        )
    return address


def list_interfaces() -> dict[str, str]:
    """Return the IPv4 addresses of this host by name of the network interface."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                response = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue
            addresses[name] = socket.inet_ntoa(response[20:24])
    return addresses


def identify_host() -> str:
    """Return an id shared by all processes that can connect to each other through Unix sockets.

    Returns an empty string if the id is unknown. A host name is not sufficient: containers on different machines may
    have the same name, and containers on the same machine may have separate networks.
    """
    boot_id = read_text_or_empty("/proc/sys/kernel/random/boot_id").strip()
    try:
        return f"{boot_id}-{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return ""


def find_interface(address: str) -> str:
    """Return the name of the network interface that sends packets to `address`.

    If `address` belongs to this host, return the interface with this address. The name is exact, because gloo does not
    support patterns. Raises OSError if there is no route.
    """
    interfaces = list_interfaces()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends no packet; the kernel only selects the route
        source = probe.getsockname()[0]
    local_address = address if address in interfaces.values() else source
    for name, interface_address in interfaces.items():
        if interface_address == local_address:
            return name
    return "lo"


def read_sent_bytes(name: str) -> int:
    """Return the number of bytes that an interface has sent, including packet headers, or 0 if it is unknown.

    /sys/class/net is not used, because it does not show the counters of a separate network namespace.
    """
    counters = re.search(
        rf"^\s*{re.escape(name)}:((?:\s+\d+)+)", read_text_or_empty("/proc/self/net/dev"), re.MULTILINE
    )
    return int(counters[1].split()[8]) if counters else 0


def check_interface(name: str) -> str:
    """Return `name` if this host has an interface with this name and an address. Raises UserError otherwise."""
    interfaces = list_interfaces()
    if name not in interfaces:
        available = ", ".join(f"{interface} ({address})" for interface, address in interfaces.items())
        raise UserError(f"launch.interface={name} does not exist on {socket.gethostname()}; use one of: {available}")
    return name


def derive_ports(token: str) -> list[int]:
    """Derive eight candidate ports from a token, so that all ranks of an attempt use the same ports."""
    seed = int.from_bytes(token.encode()[-16:].rjust(16, b"\0"), "big") * 2654435761
    return [PORTS[(seed + i * 7919) % len(PORTS)] for i in range(8)]


def serve_on_free_port(candidates: Sequence[int], serve: Callable[[int], T]) -> T:
    """Call `serve(port)` with the first free port, and return the result. Raises UserError if no port is free."""
    problem: Exception = OSError("no port")
    for port in candidates:
        try:
            return serve(port)
        except (OSError, RuntimeError) as error:
            problem = error
    raise UserError(
        f"none of the ports {list(candidates)} is free on {socket.gethostname()}: {problem}; start the run again"
    )


def connect_to_rank0(host: str, candidates: Sequence[int], connect: Callable[[int], T | None], patience: float) -> T:
    """Call `connect(port)` until rank 0 responds, and return the result.

    `connect` returns None if another program has responded. This function fails after 10 s if the host cannot be
    resolved or reached. If the host refuses connections, the host is running, and rank 0 has `patience` seconds to open
    a port. Raises UnreachableError with the host, address, interface and ports.
    """
    start = time.monotonic()
    address = "?"
    while True:
        limit = UNREACHABLE_SECONDS
        problem = ""
        try:
            address = resolve_ipv4(host)
            for port in candidates:
                try:
                    socket.create_connection((address, port), timeout=2).close()
                except ConnectionRefusedError as error:
                    problem = problem or str(error)
                    limit = patience
                    continue
                result = connect(port)
                if result is not None:
                    return result
                problem = f"port {port} is used by another program"
                limit = patience
        except OSError as error:
            problem = str(error)
        if time.monotonic() - start > min(limit, patience):
            raise UnreachableError(describe_unreachable(host, address, candidates, problem))
        time.sleep(0.05)


def describe_unreachable(host: str, address: str, candidates: Sequence[int], problem: str) -> str:
    """Describe why rank 0 cannot be reached, with remedies."""
    try:
        interface = find_interface(address)
    except OSError:
        interface = "none"
    ports = f"ports {candidates[0]} and {len(candidates) - 1} more"
    return (
        f"{socket.gethostname()} cannot reach rank 0 on {host} (address {address}, interface {interface}, {ports}): "
        f"{problem}; check the host name, the firewall and whether rank 0 has started, or set launch.interface"
    )
