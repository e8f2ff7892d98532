"""Voices with references of given lengths: those the server has, else made of its own speech."""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench_ttfa.worker import Connection
from bench_ttfa.workload import TextSource
from clients import connect, decode_turn, save
from clients.decode import Samples
from clients.voices import Voice, add_voice, delete_voice, list_voices

_TOLERANCE = 0.1  # of the length asked for
_NEVER_REPEATED = 77_777  # seed of the texts that the references say


@contextlib.contextmanager
def reference_voices(
    connection: Connection, lengths_s: Sequence[float]
) -> Iterator[dict[float, str]]:
    """Length in seconds -> name of a voice; 0 is missing where the model speaks with one only.

    Voices that had to be made are deleted at the end.

    Raises:
        PlosiveError: the server cannot be reached, or refuses a clip.
    """
    url, key = connection.url, connection.api_key
    known = list_voices(url, api_key=key) if lengths_s else []
    names, made = {}, []
    try:
        for length_s in lengths_s:
            voice = closest(known, length_s)
            if voice is None and length_s > 0:
                voice = _make(connection, length_s)
                made.append(voice)
            if voice is not None:
                names[length_s] = voice.name
        yield names
    finally:
        for voice in made:
            delete_voice(url, voice.name, api_key=key)


def closest(voices: Sequence[Voice], length_s: float) -> Voice | None:
    """The voice nearest to the length, if it is near."""
    nearest = min(voices, key=lambda voice: abs(voice.duration_s - length_s), default=None)
    if nearest is None or abs(nearest.duration_s - length_s) > _TOLERANCE * length_s:
        return None
    return nearest


def _make(connection: Connection, length_s: float) -> Voice:
    samples, rate_hz, text = asyncio.run(_speak(connection, length_s))
    name = f"bench-{length_s:g}s-{os.getpid()}".replace(".", "_")
    with tempfile.TemporaryDirectory() as folder:
        clip = Path(folder) / "reference.wav"
        save(clip, samples, rate_hz)
        return add_voice(connection.url, name, clip, text, api_key=connection.api_key)


async def _speak(connection: Connection, length_s: float) -> tuple[Samples, int, str]:
    """Speech of the server's default voice, exactly so long, its rate and what is said."""
    parts, said, rate_hz, num_left = list[Samples](), list[str](), 0, 1
    texts = TextSource(_NEVER_REPEATED, "prose")
    async with connect(connection.url, api_key=connection.api_key) as session:
        while num_left > 0:
            said += texts.take(1)
            speech = session.say(said[-1])
            packets = [packet async for packet in speech]
            assert speech.turn.metrics is not None, said[-1]
            samples, rate_hz = decode_turn(packets, session.format, speech.turn.metrics.num_samples)
            parts.append(samples)
            num_left = round(length_s * rate_hz) - sum(map(len, parts))
    whole = np.concatenate(parts)[: round(length_s * rate_hz)]
    return whole, rate_hz, " ".join(said)
