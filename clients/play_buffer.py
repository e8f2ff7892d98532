"""The samples between the network and a loudspeaker: jitter buffer, played clock, clear.

One thread feeds, the device's thread pulls. What is pulled is heard, so the count of it is the
clock of what was heard; after `clear` no sample that was there before is pulled, but for the few
that fade out.
"""

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from clients.decode import Samples


class Track:
    """One turn's place in the buffer. `on_over` is called once, by the pulling or clearing thread:
    its last sample was pulled, or it was cleared."""

    def __init__(self, on_over: Callable[[], object]) -> None:
        self.num_played = 0  # samples
        self.num_underruns = 0  # times that it ran dry before its end
        self.is_cleared = False
        self._on_over = on_over
        self._chunks: deque[Samples] = deque()
        self._num_waiting = 0
        self._is_ended = False
        self._is_sounding = False


class PlayBuffer:
    """Tracks, played one after another without a gap, in the order in which they were added.

    A track begins when `num_prebuffered` samples of it, or all of it, are there; one that runs dry
    waits for that many again. One that is cleared while it sounds fades out over `num_fade` samples
    (or those that are there): cut at a loud sample, it would click. They count as played.
    """

    def __init__(self, num_prebuffered: int, num_fade: int = 0) -> None:
        self._num_prebuffered = num_prebuffered
        self._num_fade = num_fade
        self._fading = np.zeros(0, np.float32)  # still to be pulled, before any track
        self._tracks: deque[Track] = deque()
        self._lock = threading.Lock()

    def add(self, track: Track) -> None:
        with self._lock:
            self._tracks.append(track)

    def feed(self, track: Track, samples: Samples) -> None:
        """Nothing, if the track is cleared."""
        with self._lock:
            if not track.is_cleared and len(samples):
                track._chunks.append(samples)
                track._num_waiting += len(samples)

    def end(self, track: Track) -> None:
        """No more samples come for the track."""
        with self._lock:
            track._is_ended = True

    def clear(self) -> list[Track]:
        """Drop all that waits, at once. Returns the tracks that were not over."""
        with self._lock:
            cleared = list(self._tracks)
            if cleared and cleared[0]._is_sounding:
                self._fade_out(cleared[0])
            self._tracks.clear()
            for track in cleared:
                track.is_cleared = True
                track._chunks.clear()
                track._num_waiting = 0
        for track in cleared:
            track._on_over()
        return cleared

    def pull(self, out: Samples) -> None:
        """Fill `out` (f32 [num_samples]) with what comes next, and with silence behind it."""
        over = []
        with self._lock:
            num_filled = min(len(self._fading), len(out))
            out[:num_filled] = self._fading[:num_filled]
            self._fading = self._fading[num_filled:]
            while self._tracks:
                track = self._tracks[0]
                num_filled += self._pull_track(track, out[num_filled:])
                if track._num_waiting or not track._is_ended:
                    break
                over.append(self._tracks.popleft())
        out[num_filled:] = 0.0
        for track in over:
            track._on_over()

    def _fade_out(self, track: Track) -> None:
        fading = np.empty(min(self._num_fade, track._num_waiting), np.float32)
        self._take(track, fading)
        fading *= np.linspace(1.0, 0.0, len(fading) + 2, dtype=np.float32)[1:-1]
        self._fading = np.concatenate((self._fading, fading))

    def _pull_track(self, track: Track, out: Samples) -> int:
        is_ready = track._is_ended or track._num_waiting >= self._num_prebuffered
        if not (track._is_sounding or is_ready):
            return 0
        track._is_sounding = True
        num_taken = self._take(track, out)
        if num_taken < len(out) and not track._is_ended:
            track.num_underruns += 1
            track._is_sounding = False
        return num_taken

    def _take(self, track: Track, out: Samples) -> int:
        num_taken = min(track._num_waiting, len(out))
        num_copied = 0
        while num_copied < num_taken:
            chunk = track._chunks.popleft()
            num = min(len(chunk), num_taken - num_copied)
            out[num_copied : num_copied + num] = chunk[:num]
            num_copied += num
            if num < len(chunk):
                track._chunks.appendleft(chunk[num:])
        track._num_waiting -= num_taken
        track.num_played += num_taken
        return num_taken
