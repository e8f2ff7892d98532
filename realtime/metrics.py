"""What `/metrics` tells: counters, gauges and latency histograms, in a registry of the server's own.

Base units as Prometheus wants them: seconds, bytes, `_total` counters.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from realtime.wire import TurnMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFA_BUCKETS_S = (0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
_ENCODE_BUCKETS_S = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 2e-3, 1e-2)
_READY_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """One instance per server. Increments are thread-safe."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.sessions = Gauge("plosive_sessions", "Open sessions", registry=registry)
        self.sessions_opened = counter("plosive_sessions_opened", "Sessions accepted")
        self.refused = counter("plosive_sessions_refused", "Upgrades refused", ["reason"])
        self.ttfa = histogram(
            "plosive_ttfa_seconds",
            "Commit parsed -> first packet handed to the socket (below 0 counts as 0)",
            buckets=_TTFA_BUCKETS_S,
        )
        self.ready = histogram(
            "plosive_prefill_seconds", "Speaker reference and prompt", buckets=_READY_BUCKETS_S
        )
        self.turns = counter("plosive_turns", "Turns by how they ended", ["end"])
        self.frames = counter("plosive_frames", "Frames encoded")
        self.stale_frames = counter("plosive_stale_frames", "Frames dropped before encoding")
        self.packets = counter("plosive_packets", "Packets encoded")
        self.audio_bytes = counter("plosive_audio_bytes", "Bytes of encoded audio")
        self.underruns = counter("plosive_underruns", "Gaps by the server's playback clock")
        self.encode = histogram(
            "plosive_encode_seconds",
            "Resampling and encoding, per event of the codec",
            buckets=_ENCODE_BUCKETS_S,
        )
        self.blocked = counter(
            "plosive_blocked", "Streams paused because their socket did not drain"
        )
        self.errors = counter("plosive_errors", "Errors sent, by code", ["code"])

    def watch(self, name: str, help: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is scraped."""
        Gauge(f"plosive_{name}", help, registry=self.registry).set_function(read)

    def watch_all(self, prefix: str, read: Callable[[], Mapping[str, float]]) -> None:
        """As many gauges as `read` has entries, at every scrape anew."""
        self.registry.register(_Stats(f"plosive_{prefix}", read))

    def turn_done(self, metrics: TurnMetrics) -> None:
        self.turns.labels("done").inc()
        self.underruns.inc(metrics.num_underruns)
        if metrics.server_ttfa_ms is not None:
            self.ttfa.observe(max(0.0, metrics.server_ttfa_ms / 1000.0))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _Stats(Collector):
    def __init__(self, prefix: str, read: Callable[[], Mapping[str, float]]) -> None:
        self._prefix = prefix
        self._read = read

    def describe(self) -> list[Metric]:
        return []  # so that registering does not read

    def collect(self) -> Iterator[Metric]:
        for name, value in self._read().items():
            yield GaugeMetricFamily(f"{self._prefix}_{name}", "Engine statistics", value=value)
