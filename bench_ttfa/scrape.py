"""The server's own counters, from /metrics in the Prometheus text format."""

import urllib.error
import urllib.request
from http.client import HTTPException

from clients.address import http_url, key_headers

_TIMEOUT_S = 5.0
_COUNTED = ("_total", "_sum", "_count")


def scrape(url: str, api_key: str | None = None) -> dict[str, float]:
    """Every sample without labels; nothing where the server gives none."""
    request = urllib.request.Request(http_url(url, "/metrics"), headers=key_headers(api_key))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            text = response.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        error.close()
        return {}
    except (OSError, HTTPException):
        return {}
    return parse(text)


def parse(text: str) -> dict[str, float]:
    """
    Example:
        >>> parse("# HELP a b\\na_total 2.0\\nb{x=\\"1\\"} 3.0\\n")
        {'a_total': 2.0}
    """
    samples = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if line.startswith("#") or "{" in name:
            continue
        try:
            samples[name] = float(value)
        except ValueError:
            continue
    return samples


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What counters grew by, and the values of gauges afterwards."""
    return {
        name: value - before.get(name, 0.0) if name.endswith(_COUNTED) else value
        for name, value in after.items()
    }
