"""Set-up of the backend `builtin` in a run; see common/ranks/backend_setup for the functions that a run calls."""

from __future__ import annotations

from collections.abc import Sequence

from common.backend.algorithm_choice import set_all_reduce_algorithm
from common.backend.certificates import Identity
from common.backend.private_folder import check_tls, create_or_load_identity, delete_key_and_certificate
from common.backend.torch_registration import TransportSettings, register_backend
from common.ranks.links.memory_stream import choose_polling_seconds
from common.ranks.rank_info import RankInfo
from common.system import network
from configs.shared import Launch

__all__ = [
    "check_tls",
    "create_or_load_identity",
    "delete_key_and_certificate",
    "make_transport_settings",
    "register",
    "set_all_reduce_algorithm",
]


def register(
    rank_info: RankInfo, settings: Launch, hosts: Sequence[str], interface: str, identity: Identity | None
) -> TransportSettings:
    """Register the backend with torch, and return the settings of its process groups."""
    transport = make_transport_settings(rank_info, settings, hosts, interface, identity)
    register_backend(transport)
    return transport


def make_transport_settings(
    rank_info: RankInfo, settings: Launch, hosts: Sequence[str], interface: str, identity: Identity | None = None
) -> TransportSettings:
    """Return the settings with which process groups of the backend `builtin` connect in this run."""
    if rank_info.launcher == "local":  # local ranks may simulate several hosts
        hosts = [str(rank * rank_info.nodes // rank_info.size) for rank in range(rank_info.size)]
    machine = network.identify_host() if settings.transport == "auto" else ""
    return TransportSettings(
        run=rank_info.attempt_id or rank_info.master,
        hosts=hosts,
        algorithm="ring" if settings.algorithm == "auto" else settings.algorithm,  # auto starts with ring
        address=network.list_interfaces()[interface],
        host=machine and f"{hosts[rank_info.rank]}-{machine}",
        polling_seconds=choose_polling_seconds(rank_info.local_size),
        setup_timeout=settings.setup_timeout,
        identity=identity,
    )
