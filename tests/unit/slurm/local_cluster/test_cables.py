"""Rates and delays of the local cluster's cables, as text and as commands of tc."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.system.errors import UserError
from slurm.local_cluster import cables, slurm_conf
from slurm.local_cluster.cables import Shape

SHAPES = [
    ("", "", Shape(), "-"),
    ("200mbit", "", Shape(200e6), "200mbit"),
    ("2.5gbit", "500us", Shape(2.5e9, 5e-4), "2.5gbit 500us"),
    ("100kbit", "1s", Shape(1e5, 1.0), "100kbit 1s"),
]


@pytest.mark.parametrize("rate, delay, shape, description", SHAPES)
def test_rates_and_delays_have_units(rate: str, delay: str, shape: Shape, description: str) -> None:
    parsed = cables.parse_rate_and_delay(rate, delay)
    assert parsed == pytest.approx(shape)
    assert parsed.describe() == description


def test_long_delays_are_refused() -> None:
    with pytest.raises(UserError, match=r"DELAY must be a number with a unit, from 1us to 1s, .*\(got '1500ms'\)"):
        cables.parse_rate_and_delay("", "1500ms")


@pytest.mark.parametrize("rate", ["abc", "0", "200", "0mbit", "99kbit", "101gbit", "1e3mbit", "1mbit; reboot"])
def test_invalid_rates_are_refused(rate: str) -> None:
    with pytest.raises(UserError, match="from 100kbit to 100gbit, such as 200mbit"):
        cables.parse_rate_and_delay(rate, "")


def test_the_delay_is_the_outer_queue_and_the_rate_the_inner_one() -> None:
    delay, rate = cables.list_tc_commands("eth0", Shape(8e6, 0.005))
    assert delay[5:] == ["root", "handle", "1:", "netem", "delay", "5000us", "limit", "100000"]
    assert " ".join(rate[5:]) == "parent 1:1 handle 10: tbf rate 8000000bit burst 5000b latency 400ms"
    assert not cables.list_tc_commands("eth0", Shape())


def test_tc_is_required_only_if_a_rate_or_delay_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_conf, "ADMIN_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    cables.check_shaping_support(Shape())
    with pytest.raises(UserError, match="apt-get install iproute2"):
        cables.check_shaping_support(Shape(rate=1e6))
