"""The player for code that blocks: the twin of `clients.player`."""

from typing import Self

import clients.player
from clients.devices import Device
from clients.interruption import Interruption
from clients.loop_thread import LoopThread
from clients.speech import TextSource
from clients.sync import Session, Turn, call, text_source


class Player:
    """A loudspeaker for a session; takes the arguments and raises the errors of `clients.Player`.

    Example:
        with connect(url) as session, Player(session) as player:
            player.play("Hello! How can I help you?").wait()
            player.play("Let me tell you a long story.")
            wait_for_the_user()
            heard = player.interrupt()
    """

    def __init__(
        self, session: Session, device: Device | None = None, *, buffer_ms: int = 60
    ) -> None:
        self._loop = session.loop
        self._player = clients.player.Player(session.asynchronous, device, buffer_ms=buffer_ms)

    @property
    def num_underruns(self) -> int:
        """How often a turn ran dry before its end."""
        return self._player.num_underruns

    def play(self, text: TextSource) -> "Playback":
        """Say a text, or an iterator of pieces of it, after what is being played. Returns at once.

        Raises:
            PlosiveError: what ended the session.
        """
        source = text_source(text)
        playback = self._loop.run(call(lambda: self._player.play(source)))
        return Playback(playback, self._loop)

    def interrupt(self) -> Interruption:
        """Fall silent at once and cancel everything, from any thread. Returns and raises like
        `clients.Player.interrupt`."""
        return self._loop.run(self._player.interrupt())

    def wait(self) -> None:
        """Until everything was played or interrupted."""
        self._loop.run(self._player.wait())

    def __enter__(self) -> Self:
        self._loop.run(self._player.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.run(self._player.__aexit__(*error))


class Playback:
    """One turn being played. Made by `Player.play`."""

    def __init__(self, playback: clients.player.Playback, loop: LoopThread) -> None:
        self.turn = Turn(playback.turn, loop)
        self._playback = playback
        self._loop = loop

    @property
    def played_ms(self) -> float:
        """How much of the turn's audio the device has taken."""
        return self._playback.played_ms

    @property
    def was_interrupted(self) -> bool:
        return self._playback.was_interrupted

    def wait(self) -> None:
        """Until it was heard.

        Raises:
            PlosiveError: what kept the turn from being said to its end.
        """
        self._loop.run(self._playback.wait())
