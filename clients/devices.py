"""Where samples are heard: a sound card, or nowhere."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from clients.decode import Samples

_BLOCK_MS = 10  # of the device that nobody hears

Pull = Callable[[Samples], None]  # fills f32 [num_samples] with the next samples, mono, -1..1


class Device(Protocol):
    """Plays what it pulls, from a thread of its own choice."""

    def start(self, sample_rate_hz: int, pull: Pull) -> None:
        """Begin to pull. Raises OSError if there is nothing to play on."""

    def stop(self) -> None:
        """Pull no more."""


class SoundCard:
    """An output of this machine, through sounddevice: `pip install -e ".[audio]"`.

    `name` is a device's number or a part of its name; None is the default one.
    """

    def __init__(self, name: int | str | None = None, *, latency: float | str = "low") -> None:
        self._name = name
        self._latency = latency
        self._stream: Any = None

    def start(self, sample_rate_hz: int, pull: Pull) -> None:
        """Open the card.

        Raises:
            OSError: sounddevice or PortAudio is not installed, or no output can be opened.
        """
        sounddevice = load_sounddevice()

        def fill(out: Samples, num_samples: int, time: object, status: object) -> None:
            pull(out[:, 0])

        try:
            self._stream = sounddevice.OutputStream(
                samplerate=sample_rate_hz,
                channels=1,
                dtype="float32",
                device=self._name,
                latency=self._latency,
                callback=fill,
            )
            self._stream.start()
        except (sounddevice.PortAudioError, ValueError) as error:
            raise OSError(f"cannot open the sound output: {error}") from error

    def stop(self) -> None:
        """After what it has taken was heard: some hundredths of a second."""
        if self._stream is not None:
            self._stream.stop()
            self._stream.close()
            self._stream = None


class NullDevice:
    """Heard by nobody: time passes when `advance` says so, and what would be heard is kept.

    Example:
        device = NullDevice()
        async with Player(session, device) as player:
            playing = player.play("Hello.")
            device.advance(ms=100)
            assert playing.played_ms <= 100
    """

    def __init__(self) -> None:
        self.sample_rate_hz = 0
        self.blocks: list[Samples] = []
        self._pull: Pull | None = None

    @property
    def heard(self) -> Samples:
        """f32 [num_samples]: all that was played, silence included."""
        return np.concatenate([np.zeros(0, np.float32), *self.blocks])

    def start(self, sample_rate_hz: int, pull: Pull) -> None:
        self.sample_rate_hz, self._pull = sample_rate_hz, pull

    def stop(self) -> None:
        self._pull = None

    def advance(self, ms: int) -> None:
        """Play `ms` milliseconds, in whole blocks; nothing while it is stopped."""
        for _ in range(ms // _BLOCK_MS):
            if self._pull is not None:
                block = np.empty(self.sample_rate_hz * _BLOCK_MS // 1000, np.float32)
                self._pull(block)
                self.blocks.append(block)


def load_sounddevice() -> Any:
    """The module. Raises OSError if it, or the PortAudio library that it needs, is missing."""
    try:
        import sounddevice
    except ImportError as error:
        raise OSError(
            'sounddevice is not installed; in a clone of Plosive: pip install -e ".[audio]"'
        ) from error
    except OSError as error:
        raise OSError(f"{error}; on Debian and Ubuntu: apt install libportaudio2") from error
    return sounddevice
