"""Names, addresses, interfaces and ports through which the ranks find rank 0. Imports no torch."""

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

from common.core.errors import Unreachable, UserError
from common.core.text import read_or_empty

T = TypeVar("T")
UNREACHABLE_SECONDS = 10.0  # until rank 0 is given up, so that the error comes within 15 s of a job's start
SIOCGIFADDR = 0x8915  # from linux/sockios.h
PORTS = range(20_000, 60_000)


def find_url_problem(url: str, seconds: float) -> str:
    """Return why no answer came from `url` within so many seconds; empty if one came, of whatever kind."""

    def ask() -> str:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds).close()
        except urllib.error.HTTPError:
            pass  # it answers
        except Exception as error:  # noqa: BLE001 (no name, no route, no HTTP)
            return str(getattr(error, "reason", None) or error)
        return ""

    # a slow name server, many addresses or a dripping answer know no time-out
    problem = call_with_timeout(seconds, ask)
    return f"nothing after {seconds:g} s" if problem is None else problem


def call_with_timeout(seconds: float, function: Callable[[], T]) -> T | None:
    """Return the result of `function`, or None if it takes longer; its errors are raised here.

    It runs in a thread, which may outlive this call: a library may wait for ever, whatever its own time-out.
    """
    answers: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()

    def call() -> None:
        try:
            answers.put((function(), None))
        except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
            answers.put((None, error))

    threading.Thread(target=call, daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        return None
    if error is not None:
        raise error
    return answer


def resolve_ipv4(host: str) -> str:
    """Return the IPv4 address of a host. Raises OSError."""
    return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])


def resolve_for_others(host: str, role: str, hosts: int) -> str:
    """Return the IPv4 address by which all `hosts` hosts reach this one. Raises UserError where its name has none."""
    try:
        address = resolve_ipv4(host)
    except OSError as error:
        raise UserError(f"{host}, {role}, does not know its own name: {error}; add it to /etc/hosts or DNS") from None
    if hosts > 1 and address.startswith("127."):
        raise UserError(
            f"{host}, {role}, resolves to {address}, which other hosts cannot reach; give its name the address of its "
            "network interface in /etc/hosts"
        )
    return address


def list_interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def identify_host() -> str:
    """Return a text that processes have in common which reach each other through Unix sockets; empty if not known.

    Containers may have the same host name on different machines, or networks of their own on the same one.
    """
    try:
        return f"{read_or_empty('/proc/sys/kernel/random/boot_id').strip()}-{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return ""


def find_interface(address: str) -> str:
    """Return the interface on which packets to `address` leave, or that of an address of this host.

    One concrete name: gloo knows no patterns. Raises OSError without a route.
    """
    own = list_interfaces()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: the kernel only chooses the route
        source = probe.getsockname()[0]
    wanted = address if address in own.values() else source
    return next((name for name, held in own.items() if held == wanted), "lo")


def read_sent_bytes(name: str) -> int:
    """Return how many bytes have left by an interface, headers of all packets included; 0 where it is not known.

    /sys/class/net has the same counters, but not of this process's network where that is one of its own.
    """
    found = re.search(rf"^\s*{re.escape(name)}:((?:\s+\d+)+)", read_or_empty("/proc/self/net/dev"), re.MULTILINE)
    return int(found[1].split()[8]) if found else 0


def check_interface(name: str) -> str:
    """Return `name` if this host has such an interface with an address. Raises UserError otherwise."""
    found = list_interfaces()
    if name not in found:
        here = ", ".join(f"{n} ({a})" for n, a in found.items())
        raise UserError(f"launch.interface={name} does not exist on {socket.gethostname()}; it has {here}")
    return name


def derive_ports(token: str) -> list[int]:
    """Return eight ports to try: the same for all ranks of an attempt, others for another token."""
    seed = int.from_bytes(token.encode()[-16:].rjust(16, b"\0"), "big") * 2654435761
    return [PORTS[(seed + i * 7919) % len(PORTS)] for i in range(8)]


def serve_on_free_port(candidates: Sequence[int], serve: Callable[[int], T]) -> T:
    """Call `serve(port)` for the first free port; return its result. Raises UserError if none is free."""
    problem: Exception = OSError("no port")
    for port in candidates:
        try:
            return serve(port)
        except (OSError, RuntimeError) as error:
            problem = error
    raise UserError(f"no port of {list(candidates)} is free on {socket.gethostname()}: {problem}; start again")


def connect_to_rank0(host: str, candidates: Sequence[int], connect: Callable[[int], T | None], patience: float) -> T:
    """Call `connect(port)` until rank 0 answers; return its result. None means that another program answered.

    A host that cannot be resolved or reached is given up after 10 s; one that refuses is up, and may take
    `patience` seconds until rank 0 serves. Raises Unreachable with host, address, interface, ports.
    """
    start = time.monotonic()
    address = "?"
    while True:
        limit, problem = UNREACHABLE_SECONDS, ""
        try:
            address = resolve_ipv4(host)
            for port in candidates:
                try:
                    socket.create_connection((address, port), timeout=2).close()
                except ConnectionRefusedError as error:
                    problem, limit = problem or str(error), patience
                    continue
                found = connect(port)
                if found is not None:
                    return found
                problem, limit = f"port {port} belongs to another program", patience
        except OSError as error:
            problem = str(error)
        if time.monotonic() - start > min(limit, patience):
            raise Unreachable(describe_unreachable(host, address, candidates, problem))
        time.sleep(0.05)


def describe_unreachable(host: str, address: str, candidates: Sequence[int], problem: str) -> str:
    """Return a message with the reason why rank 0 cannot be reached, and the remedies."""
    try:
        route = find_interface(address)
    except OSError:
        route = "none"
    return (
        f"{socket.gethostname()} cannot reach rank 0 on {host} (address {address}, interface {route}, "
        f"ports {candidates[0]} and {len(candidates) - 1} more): {problem}; check the name, the firewall and that "
        "rank 0 started, or set launch.interface"
    )
