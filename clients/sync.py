"""The client for code that blocks: the same session, turns and errors, without `await`.

    from clients.sync import connect

    with connect("http://localhost:8765") as session:
        for packet in session.say("Hello there."):
            ...

The asynchronous client runs on a thread of its own underneath. Every object here may be used from
several threads: one may read a turn while another interrupts it. `Player` lets it be heard.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import clients.opening
import clients.session
import clients.speech
import clients.turn
from clients.interruption import Interruption
from clients.loop_thread import LoopThread, in_daemon_thread
from clients.protocol import TurnEvent
from clients.speech import TextSource
from clients.turn import Timings
from realtime.errors import ConnectionLost, SessionError
from realtime.wire import (
    AudioPacket,
    EffectiveFormat,
    Sampling,
    SessionReady,
    TurnCancelled,
    TurnMetrics,
    Warn,
)

if TYPE_CHECKING:
    from clients.sync_player import Playback, Player
else:

    def __getattr__(name: str) -> object:
        """The player, which is built on what is here."""
        if name not in ("Playback", "Player"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from clients import sync_player  # it imports this module

        return getattr(sync_player, name)


__all__ = ["Playback", "Player", "Session", "Speech", "Turn", "connect"]

T = TypeVar("T")


def connect(url: str, **options: Unpack[clients.opening.ConnectOptions]) -> "Session":
    """Open a session; takes the options and raises the errors of `clients.connect`. Leaving its block
    closes the socket and ends the thread.

    Example:
        with connect("http://localhost:8765", voice="af_heart") as session:
            for packet in session.say("Hello there."):
                player.feed(packet)
    """
    opening = clients.opening.connect(url, **options)
    with ExitStack() as opened:
        loop = opened.enter_context(LoopThread())
        session = loop.run(opening.__aenter__())
        opened.callback(lambda: loop.run(session.drop()))
        return Session(session, loop, opened.pop_all())


class Session:
    """An open session with its voice prefilled. Made by `connect`."""

    def __init__(
        self, session: clients.session.Session, loop: LoopThread, opened: ExitStack
    ) -> None:
        """`opened` is closed when the block is left."""
        self.asynchronous = session
        self.loop = loop
        self._opened = opened

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.loop.is_of_a_parent:
            self._opened.close()

    @property
    def ready(self) -> SessionReady:
        """Of the start, the latest update or the latest reconnection."""
        return self.asynchronous.ready

    @property
    def ready_ms(self) -> float:
        """connect() called -> session.ready."""
        return self.asynchronous.ready_ms

    @property
    def format(self) -> EffectiveFormat:
        """The format that really flows; `clients.Decoder` takes it."""
        return self.asynchronous.format

    @property
    def warnings(self) -> deque[Warn]:
        """Those that belong to no turn; `Turn.warnings` has the others."""
        return self.asynchronous.warnings

    def turn(self) -> "Turn":
        """A new turn; several may be open at once. Raises like `clients.Session.turn`."""
        return Turn(self.loop.run(call(self.asynchronous.turn)), self.loop)

    def say(self, text: TextSource) -> "Speech":
        """Say a text, or an iterator of pieces of it, as one turn.

        The text is sent when iteration begins; an iterator is read on another thread.

        Example:
            for packet in session.say(word + " " for word in words):
                player.feed(packet)

        Raises:
            PlosiveError: from the loop, whatever keeps the turn from being said to its end.
        """
        return Speech(self.turn(), text_source(text))

    def interrupt(self, played_ms: float | None = None) -> Interruption:
        """Cancel all that is being said, from any thread. Raises like
        `clients.Session.interrupt`.

        Example:
            heard = session.interrupt(played_ms=640)
            print(heard.spoken_text, "|", heard.remaining_text)
        """
        return self.loop.run(self.asynchronous.interrupt(played_ms))

    def update(
        self,
        *,
        voice: str | None = None,
        prompt: str | None = None,
        sampling: Sampling | None = None,
        max_lead_ms: int | None = None,
    ) -> SessionReady:
        """Change what the next turn uses; what is left out stays. Raises like
        `clients.Session.update`."""
        update = self.asynchronous.update(
            voice=voice, prompt=prompt, sampling=sampling, max_lead_ms=max_lead_ms
        )
        return self.loop.run(update)

    def close(self) -> None:
        """Let the server finish what is committed, then close. Turns deliver until they end."""
        self.loop.run(self.asynchronous.close())


class Turn:
    """One reply. Made by `Session.turn`; `clients.Turn` explains it.

    Example:
        with session.turn() as turn:
            turn.append("Hello. ")
            turn.commit()
            for event in turn:
                ...
    """

    def __init__(self, turn: clients.turn.Turn, loop: LoopThread) -> None:
        self.asynchronous = turn
        self._loop = loop

    @property
    def turn_id(self) -> int | None:
        """Given with the first text."""
        return self.asynchronous.turn_id

    @property
    def timings(self) -> Timings:
        return self.asynchronous.timings

    @property
    def metrics(self) -> TurnMetrics | None:
        """The server's account, with `TurnDone`."""
        return self.asynchronous.metrics

    @property
    def warnings(self) -> list[Warn]:
        """What the server found wrong with its text, so far."""
        return self.asynchronous.warnings

    @property
    def is_over(self) -> bool:
        """Done, cancelled or failed: no audio comes any more."""
        return self.asynchronous.is_over

    def append(self, text: str) -> None:
        """Send a piece of text. Raises like `clients.Turn.append`."""
        self._loop.run(self.asynchronous.append(text))

    def flush(self) -> None:
        """Have spoken what was sent so far. Raises like `append`."""
        self._loop.run(self.asynchronous.flush())

    def commit(self) -> None:
        """Say that no more text comes. Raises like `append`."""
        self._loop.run(self.asynchronous.commit())

    def cancel(self, played_ms: float | None = None) -> TurnCancelled:
        """Barge-in, from any thread. Returns and raises like `clients.Turn.cancel`."""
        return self._loop.run(self.asynchronous.cancel(played_ms))

    def audio(self) -> Iterator[AudioPacket]:
        """Only the audio, to the turn's end. Raises like iterating the turn."""
        return (event for event in self if isinstance(event, AudioPacket))

    def __iter__(self) -> Iterator[TurnEvent]:
        while (event := self._loop.run(_next(self.asynchronous))) is not None:
            yield event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self.asynchronous.abandon())


class Speech:
    """A turn that says a text: iterate it for its packets. Made by `Session.say`.

    Leaving the loop early cancels the turn. `turn` has the timings, the metrics and the warnings.
    """

    def __init__(self, turn: Turn, text: TextSource) -> None:
        self.turn = turn
        self._speech = clients.speech.Speech(turn.asynchronous, text)

    def __iter__(self) -> Iterator[AudioPacket]:
        run = self.turn._loop.run
        events = self._speech.events()
        try:
            while (event := run(_next(events))) is not None:
                if isinstance(event, AudioPacket):
                    yield event
        finally:
            # The session may be closed before the iterator; and where the garbage collector ends the
            # iterator on the session's own thread, the loop ends the events by itself.
            with suppress(ConnectionLost, SessionError):
                run(events.aclose())


async def call(function: Callable[[], T]) -> T:
    """For what must run on the loop's thread."""
    return function()


async def _next(events: AsyncIterator[TurnEvent]) -> TurnEvent | None:
    return await anext(events, None)


def text_source(text: TextSource) -> TextSource:
    """What the asynchronous client takes, of an iterator that may block."""
    if isinstance(text, Iterable) and not isinstance(text, str):
        return _read_in_thread(text)
    return text


async def _read_in_thread(text: Iterable[str]) -> AsyncIterator[str]:
    pieces = iter(text)
    while piece := await in_daemon_thread(lambda: list(islice(pieces, 1))):
        yield piece[0]
