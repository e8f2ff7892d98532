"""Who a client is where there are no keys: the address of its socket, or what a trusted proxy says."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from realtime.config import ConfigError, ServerConfig
from tests.realtime.support import TIMEOUT_S, serving, socket_status


async def test_sessions_of_one_address_without_keys(tmp_path: Path) -> None:
    async with serving(tmp_path, max_sessions_per_client=1) as served:
        async with served.connect():
            assert (await socket_status(served))[0] == 429
        await served.until_free()
        async with asyncio.timeout(TIMEOUT_S):
            async with served.connect():
                pass


@pytest.mark.parametrize(
    ("mine", "also_mine", "anothers"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::7", "2001:db8:1:3::1"),
        ("198.51.100.7", "::ffff:198.51.100.7", "::ffff:198.51.100.8"),
        ("by-a-proxy", "by-a-proxy", "by-another"),
    ],
)
async def test_an_address_is_what_somebody_has(
    tmp_path: Path, mine: str, also_mine: str, anothers: str
) -> None:
    """Whoever has one of IPv6 has a network of them."""
    options = {"max_sessions_per_client": 1, "trusted_proxies": "127.0.0.1"}
    async with serving(tmp_path, **options) as served, served.connect(**forwarded_for(mine)):
        assert (await socket_status(served, **forwarded_for(also_mine)))[0] == 429
        assert (await socket_status(served, **forwarded_for(anothers)))[0] == 101


def forwarded_for(addresses: str) -> dict[str, Any]:
    return {"additional_headers": {"X-Forwarded-For": addresses}}


@pytest.mark.parametrize("trusted", ["", "10.1.2.3", "10.0.0.0/8,::1"])
async def test_nobody_is_believed_unless_it_is_a_trusted_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: str
) -> None:
    """One who passes the header through would let every client choose its address."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn's own variable
    options = {"max_sessions_per_client": 1, "trusted_proxies": trusted}
    mine, anothers = forwarded_for("198.51.100.7"), forwarded_for("198.51.100.8")
    async with serving(tmp_path, **options) as served, served.connect(**mine):
        assert (await socket_status(served, **anothers))[0] == 429


async def test_of_several_proxies_the_first_that_is_not_trusted_is_the_client(
    tmp_path: Path,
) -> None:
    options = {"max_sessions_per_client": 1, "trusted_proxies": "127.0.0.1, 10.0.0.0/8"}
    mine = forwarded_for("made-up, 198.51.100.7, 10.1.2.3")
    async with serving(tmp_path, **options) as served, served.connect(**mine):
        for claim, status in (("other, 198.51.100.7", 429), ("made-up, 198.51.100.8", 101)):
            assert (await socket_status(served, **forwarded_for(claim)))[0] == status


@pytest.mark.parametrize("trusted", ["*", "proxy.example", "10.0.0.1/8", "10.0.0.5;10.0.0.6"])
def test_trusted_proxies_must_be_addresses(trusted: str) -> None:
    with pytest.raises(ConfigError, match="trusted_proxies: got .* like 10.0.0.5 or 10.0.0.0/8"):
        ServerConfig(trusted_proxies=trusted)
