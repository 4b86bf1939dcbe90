"""Interface of the encryption of connections between hosts."""

from __future__ import annotations

import socket
from typing import Protocol

from common.ranks.links.socket_stream import SocketStream


class Encryption(Protocol):
    """Encryption of the connections of one rank, in which both sides of a connection authenticate."""

    def open_client(self, connection: socket.socket) -> socket.socket:
        """Take over a connection and perform the handshake as a client. Raises OSError or UntrustedPeer."""

    def open_server(self, connection: socket.socket) -> socket.socket:
        """Take over a non-blocking connection, whose handshake `continue_handshake` performs."""

    def continue_handshake(self, connection: socket.socket) -> None:
        """Continue a handshake. Raises BlockingIOError if it is not complete yet, OSError, or UntrustedPeer."""

    def describe_failure(self, error: Exception) -> str:
        """Return why a handshake failed, to be read after `the peer`; an empty string for any other error."""

    def make_stream(self, connection: socket.socket, timeout: float) -> SocketStream:
        """Return a stream that encrypts the messages of a connection."""
