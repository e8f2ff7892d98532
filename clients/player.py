"""Plays what a session says, knows how much was heard, and falls silent at once."""

import asyncio
import math
from collections.abc import Callable, Generator
from contextlib import aclosing
from functools import partial
from typing import Any, Self

from clients.checks import expect, is_from
from clients.decode import Decoder
from clients.devices import Device, SoundCard
from clients.interruption import Interruption, interrupt
from clients.play_buffer import PlayBuffer, Track
from clients.session import Session
from clients.speech import Speech, TextSource
from clients.turn import Turn
from realtime.wire import AudioPacket

_FADE_MS = 5  # of an interruption: no click


class Player:
    """A loudspeaker for a session: turns are played one after another, in the order of `play`.

    Args:
        device: None is the default output of this machine (needs `pip install -e ".[audio]"`).
        buffer_ms: audio that must be there before a turn begins to sound. More of it bridges a
            worse network; all of it is added to the time to the first sound.

    Example:
        async with connect(url) as session, Player(session) as player:
            await player.play("Hello! How can I help you?")
            player.play("Let me tell you a long story.")
            await the_user_speaks()
            heard = await player.interrupt()

    Raises:
        SessionError: `invalid_option`.
        OSError: on entering, if there is nothing to play on.
    """

    def __init__(
        self, session: Session, device: Device | None = None, *, buffer_ms: int = 60
    ) -> None:
        is_device = device is None or hasattr(device, "start")
        expect(is_device, "device", device, "a device like SoundCard(), or None")
        is_delay = is_from(0, buffer_ms) and buffer_ms < math.inf
        expect(is_delay, "buffer_ms", buffer_ms, "milliseconds from 0 on")
        self._session = session
        self._device = device or SoundCard()
        self.sample_rate_hz = Decoder(session.format).sample_rate_hz
        self._buffer = PlayBuffer(
            num_prebuffered=int(self.sample_rate_hz * float(buffer_ms) // 1000),
            num_fade=self.sample_rate_hz * _FADE_MS // 1000,
        )
        self._playbacks: list[Playback] = []  # those that are not over
        self._num_underruns = 0  # of those that are

    @property
    def num_underruns(self) -> int:
        """How often a turn ran dry before its end: its text or its audio came too slowly."""
        playing = sum(playback.num_underruns for playback in self._playbacks)
        return self._num_underruns + playing

    def play(self, text: TextSource) -> "Playback":
        """Say a text, or an (async) iterator of pieces of it, after what is being played.

        Example:
            playing = player.play("One moment, please.")
            ...
            await playing  # until it was heard

        Raises:
            PlosiveError: what ended the session. What keeps the turn from being said is raised
                by awaiting the playback.
        """
        speech, decoder = self._session.say(text), Decoder(self._session.format)
        playback = Playback(speech, self._buffer, decoder, self._forget)
        self._playbacks.append(playback)
        return playback

    async def interrupt(self) -> Interruption:
        """Barge-in: fall silent at once (in a fade of 5 ms), cancel what is played and all that waits
        behind it.

        The server is told how much of each turn was heard, to the sample, the fade included.

        Returns:
            `spoken_text` and `remaining_text`, and the account of each turn; empty, if nothing
            was being played.

        Raises:
            PlosiveError: what ended the session meanwhile.
        """
        playbacks = list(self._playbacks)
        self._buffer.clear()
        turns = [(playback.turn, playback.played_ms) for playback in playbacks]
        return await interrupt([(turn, ms) for turn, ms in turns if not turn.has_failed])

    async def wait(self) -> None:
        """Until everything was played or interrupted."""
        while self._playbacks:
            await asyncio.wait([playback.over for playback in self._playbacks])

    async def __aenter__(self) -> Self:
        self._device.start(self.sample_rate_hz, self._buffer.pull)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop, whatever is being played; `wait` first to hear it all."""
        playbacks = list(self._playbacks)
        self._buffer.clear()
        self._device.stop()
        await asyncio.gather(*(playback.stop() for playback in playbacks))

    def _forget(self, playback: "Playback") -> None:
        self._playbacks.remove(playback)
        self._num_underruns += playback.num_underruns


class Playback:
    """One turn being played. Made by `Player.play`; awaiting it waits until it was heard.

    Raises, when awaited:
        PlosiveError: what kept the turn from being said to its end, after what came was played.
    """

    def __init__(
        self,
        speech: Speech,
        buffer: PlayBuffer,
        decoder: Decoder,
        on_over: "Callable[[Playback], None]",
    ) -> None:
        loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = loop.create_future()  # played to its end, or stopped
        self._speech = speech
        self._buffer = buffer
        self._decoder = decoder
        self._on_over = on_over
        self._num_decoded = 0
        self._track = Track(partial(loop.call_soon_threadsafe, self._set_over))
        buffer.add(self._track)
        self._reader = asyncio.create_task(self._read())

    @property
    def turn(self) -> Turn:
        return self._speech.turn

    @property
    def played_ms(self) -> float:
        """How much of the turn's audio the device has taken; it plays that whatever comes."""
        return 1000.0 * self._track.num_played / self._decoder.sample_rate_hz

    @property
    def num_underruns(self) -> int:
        """How often it ran dry before its end."""
        return self._track.num_underruns

    @property
    def was_interrupted(self) -> bool:
        return self._track.is_cleared

    async def stop(self) -> None:
        """Called by the player when it closes."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    def __await__(self) -> Generator[Any, None, None]:
        return self.wait().__await__()

    async def wait(self) -> None:
        """The same as awaiting the playback."""
        await asyncio.shield(self.over)
        if self._reader.cancelled() and self.was_interrupted:
            return
        await asyncio.shield(self._reader)

    def _set_over(self) -> None:
        self._on_over(self)
        self.over.set_result(None)

    async def _read(self) -> None:
        last: AudioPacket | None = None
        try:
            async with aclosing(aiter(self._speech)) as packets:
                async for packet in packets:
                    if packet.is_last:
                        last = packet  # it ends in padding; how long, the server's account says
                    else:
                        self._feed(packet)
            if last is not None:
                self._feed(last)
        finally:
            self._buffer.end(self._track)

    def _feed(self, packet: AudioPacket) -> None:
        samples = self._decoder.decode(packet)
        metrics = self.turn.metrics
        if packet.is_last and metrics is not None:
            num_samples = metrics.num_samples * self._decoder.samples_per_wire_sample
            samples = samples[: max(0, num_samples - self._num_decoded)]
        self._num_decoded += len(samples)
        self._buffer.feed(self._track, samples)
