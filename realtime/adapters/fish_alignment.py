"""Where in the audio each word is: Fish's `alignment` from the session's `turn.text` messages."""

import base64
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from realtime.wire import TurnText


class Alignment:
    """Of one speech. Each of the session's turns is a chunk with times of its own.

    Within the text that a message adds, time is shared out by the length of the words.
    """

    def __init__(self, speed: float) -> None:
        self.is_news = False
        self._speed = speed
        self._seq = 0
        self._offset_s = 0.0
        self._text = ""
        self._audio_s = 0.0
        self._segments: list[dict[str, Any]] = []

    def add(self, text: str, audio_ms: float) -> None:
        """By `audio_ms` of the turn, before `speed` was applied, `text` has been spoken; it begins
        with what was told before."""
        words, start_s = text[len(self._text) :].split(), self._audio_s
        self._text, self._audio_s = text, audio_ms / 1000.0 / self._speed
        if self._audio_s <= start_s and self._segments:  # the last words share the time of one
            last = self._segments.pop()
            words, start_s = [last["text"], *words], last["start"]
        s_per_char = (self._audio_s - start_s) / max(1, sum(map(len, words)))
        for word in words:
            end_s = start_s + s_per_char * len(word)
            times = {"start": round(start_s, 3), "end": round(end_s, 3)}
            self._segments.append({"text": word, **times})
            start_s = end_s
        self.is_news = True

    def next_chunk(self) -> None:
        """The turn is over."""
        self._seq += 1
        self._offset_s += self._audio_s
        self._text, self._audio_s, self._segments = "", 0.0, []

    def take(self) -> dict[str, Any]:
        """The fields of the next audio event; the alignment is null where there is no news."""
        snapshot = {"segments": self._segments, "audio_duration": round(self._audio_s, 3)}
        fields = {
            "content": self._text,
            "alignment": snapshot if self.is_news else None,
            "chunk_seq": self._seq,
            "chunk_audio_offset_sec": round(self._offset_s, 3),
        }
        self.is_news = False
        return fields


async def with_alignment(
    pieces: AsyncGenerator[bytes | TurnText, None], speed: float
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of one text: audio, and where its words are."""
    alignment = Alignment(speed)
    async with aclosing(pieces):
        async for piece in pieces:
            if isinstance(piece, bytes):
                yield _event(piece, alignment)
            else:
                alignment.add(piece.text, piece.audio_ms)
    if alignment.is_news:
        yield _event(b"", alignment)


def _event(audio: bytes, alignment: Alignment) -> bytes:
    content = {"audio_base64": base64.b64encode(audio).decode(), **alignment.take()}
    return b"event: message\ndata: " + json.dumps(content).encode() + b"\n\n"
