"""Fixtures of the link tests: a rendezvous for each kind of connection, and two connected ranks."""

from __future__ import annotations

from tests.harness.ranks.folder_rendezvous import connected_ranks, identity, rendezvous

__all__ = ["connected_ranks", "identity", "rendezvous"]
