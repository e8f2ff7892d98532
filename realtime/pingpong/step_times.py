"""How long steps take the host and the device, for metrics and for pacing."""

import time

from realtime.pingpong.steps import StepBuffer

_WEIGHT = 0.05  # of the newest step in the averages: they look back some twenty steps
_WINDOW_NS = 1_000_000_000


class StepTimes:
    """Written by the decode thread; any thread may read."""

    def __init__(self) -> None:
        self.host_ns = 0.0  # of the decode thread in a step, waits apart; average
        self.step_ns = 0  # from one step to the next while steps follow one another; average
        self.busy_share = 0.0  # of the time, that the device works on steps; the last second's
        self._waited_ns = 0
        self._before: StepBuffer | None = None
        self._before_ns = 0
        self._busy_ns = 0.0
        self._window_begun_ns = time.perf_counter_ns()

    def add_wait(self, begun_ns: int) -> None:
        """The thread has waited since then, for the device or for work."""
        self._waited_ns += time.perf_counter_ns() - begun_ns

    def add_call(self, begun_ns: int) -> None:
        """One `step` of the loop, begun then, is over."""
        now_ns = time.perf_counter_ns()
        host_ns, self._waited_ns = now_ns - begun_ns - self._waited_ns, 0
        self.host_ns += _WEIGHT * (host_ns - self.host_ns)
        if now_ns - self._window_begun_ns >= _WINDOW_NS:
            self.busy_share = min(1.0, self._busy_ns / (now_ns - self._window_begun_ns))
            self._busy_ns, self._window_begun_ns = 0.0, now_ns

    def add_step(self, step: StepBuffer, *, is_first: bool) -> None:
        """The ends of a step are known, so the one before it is over on the device.

        Args:
            is_first: nothing ran before it; the time since the last step is a pause.
        """
        now_ns, before = time.perf_counter_ns(), self._before
        if before is not None and before is not step:
            self._busy_ns += 1e6 * before.started.ms_until(before.stepped)
        if not is_first:
            interval_ns = now_ns - self._before_ns
            self.step_ns += (
                round(_WEIGHT * (interval_ns - self.step_ns)) if self.step_ns else (interval_ns)
            )
        self._before, self._before_ns = step, now_ns
