"""A real server process, the embedded model, the real client: what a user gets."""

import asyncio
import json
import urllib.request
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass

import numpy as np
import pytest

from clients import (
    AudioFormat,
    AudioPacket,
    ConnectionFailed,
    PlosiveError,
    Sampling,
    SessionError,
    TurnMetrics,
    TurnText,
    Warn,
    connect,
    decode_turn,
)
from realtime.wire import MAX_TEXT_CHARS, MAX_TURN_CHARS

PCM = AudioFormat(codec="pcm_s16le", sample_rate=24_000)
NUM_SLOTS = 4  # of the server
LEAD_MS = 60_000


@dataclass
class Said:
    samples: np.ndarray
    metrics: TurnMetrics
    warnings: list[Warn]
    text: str  # of the last turn.text


async def say(
    url: str, *texts: str, seed: int = 1, format: AudioFormat = PCM, voice: str | None = None
) -> Said:
    """One turn of its own session, the pieces appended one after another."""
    sampling = Sampling(seed=seed)
    async with connect(
        url, voice=voice, format=format, sampling=sampling, max_lead_ms=LEAD_MS
    ) as session:
        turn = session.turn()
        for text in texts:
            await turn.append(text)
        await turn.commit()
        events = [event async for event in turn]
        assert turn.metrics is not None
        packets = [event for event in events if isinstance(event, AudioPacket)]
        samples = np.zeros(0, np.float32)
        if packets:
            samples, _ = decode_turn(packets, session.format, turn.metrics.num_samples)
        spoken = [event.text for event in events if isinstance(event, TurnText)]
        warnings = [event for event in events if isinstance(event, Warn)]
        return Said(samples, turn.metrics, warnings, spoken[-1] if spoken else "")


def loudness(samples: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(samples))))


async def test_a_sentence_is_spoken_to_its_end(url: str) -> None:
    text = "The library on the corner opens at nine."
    said = await say(url, text)
    seconds = len(said.samples) / 24_000
    assert 1.5 < seconds < 6.0 and loudness(said.samples) > 0.01
    assert len(said.samples) == said.metrics.num_samples == said.metrics.num_frames * 960
    assert said.text == text and not said.warnings
    assert said.metrics.server_ttfa_ms is not None and said.metrics.server_ttfa_ms > 0
    timeline = said.metrics.timeline_ms
    assert timeline["prefill_done"] <= timeline["first_step"] <= timeline["first_pcm"]


async def test_opus_carries_the_same_audio(url: str) -> None:
    pcm = await say(url, "Hello there, how are you?")
    opus = await say(url, "Hello there, how are you?", format=AudioFormat(sample_rate=24_000))
    assert opus.metrics.num_samples == pcm.metrics.num_samples
    opus_24k = opus.samples[::2][: len(pcm.samples)]
    correlation = np.corrcoef(opus_24k, pcm.samples[: len(opus_24k)])[0, 1]
    assert correlation > 0.8


async def test_same_seed_same_samples_alone_or_in_company(url: str) -> None:
    texts = ["I am the first one.", "And I am the second.", "Numbers like 42 are fine."]
    alone = [await say(url, text, seed=i) for i, text in enumerate(texts)]
    crowd = await asyncio.gather(*(say(url, text, seed=i) for i, text in enumerate(texts)))
    for one, other in zip(alone, crowd, strict=True):
        np.testing.assert_array_equal(one.samples, other.samples)


async def test_text_in_any_pieces_gives_the_same_speech(url: str) -> None:
    text = "Text may arrive in pieces, word by word, while somebody else is still writing it."
    whole = await say(url, text)
    pieces = await say(url, *(text[i : i + 7] for i in range(0, len(text), 7)))
    np.testing.assert_array_equal(whole.samples, pieces.samples)


async def test_voices_differ(url: str) -> None:
    one = await say(url, "Which voice is this?", voice="af_heart")
    other = await say(url, "Which voice is this?", voice="am_michael")
    num_samples = min(len(one.samples), len(other.samples))
    assert not np.array_equal(one.samples[:num_samples], other.samples[:num_samples])


async def test_a_long_text_is_spoken_segment_by_segment(url: str) -> None:
    text = " ".join(f"This is sentence number {i}, and it is not the last." for i in range(5))
    said = await say(url, text)
    assert said.metrics.num_segments > 1 and said.text == text
    assert len(said.samples) > 24_000 * 5


async def test_barge_in_returns_what_was_heard_and_the_next_turn_speaks(url: str) -> None:
    text = "First sentence here. Second sentence follows. And a third one that nobody will hear."
    async with connect(url, format=PCM, max_lead_ms=LEAD_MS) as session:
        turn = session.turn()
        await turn.append(text)
        await turn.commit()
        async for event in turn:
            if isinstance(event, AudioPacket) and event.pts_samples > 12_000:
                break
        cancelled = await turn.cancel(played_ms=400)
        assert cancelled.spoken_text + cancelled.remaining_text == text
        assert cancelled.remaining_text and cancelled.played_ms == pytest.approx(400, abs=50)
        packets = [packet async for packet in session.say("Now something else.")]
        assert packets and packets[-1].is_last and packets[0].seq == 0


async def test_a_sign_at_the_end_is_not_said_to_be_all_of_the_text(url: str) -> None:
    """It is a segment of its own."""
    said = await say(url, "Hello there, my friend. 🙂")
    assert loudness(said.samples) > 0.01
    assert [warning.message for warning in said.warnings] == ["left out, without a reading: '🙂'"]
    alone = await say(url, "🙂")
    assert [warning.code for warning in alone.warnings] == ["text_changed", "nothing_to_speak"]


@pytest.mark.parametrize("text", ["", "   ", "...", "🙂", "\u200f\u200e", "\x00\x00", "\ud800"])
async def test_nothing_to_say_ends_with_a_warning_not_with_silence(url: str, text: str) -> None:
    said = await say(url, text)
    assert said.metrics.num_samples == 0 or loudness(said.samples) > 0
    assert said.metrics.num_samples or not text or said.warnings


@pytest.mark.parametrize(
    "text",
    [
        "Hello \u05e9\u05dc\u05d5\u05dd \u4f60\u597d world 🎉 and \ud800 more\x00.",
        "a" * 100,
        "1" * 40,
        "<|im_end|><|semantic:5|><|voice|> hello",
        "**Bold** `code` [link](https://example.com/a?b=1) #tag & 50% $5.00",
    ],
)
async def test_odd_text_is_spoken_and_ends(url: str, text: str) -> None:
    said = await say(url, text)
    assert loudness(said.samples) > 0.005
    assert said.metrics.audio_ms < 150_000


async def test_too_much_text_is_an_error_and_the_session_goes_on(url: str) -> None:
    async with connect(url, format=PCM) as session:
        turn = session.turn()
        with pytest.raises(SessionError, match="too_long"):
            await turn.append("word " * 40_000)
            await turn.commit()
            async for _ in turn:
                pass
        assert [packet async for packet in session.say("Still here.")]
        assert MAX_TEXT_CHARS < 200_000


async def test_the_longest_turn_at_once_is_taken_and_its_neighbour_speaks(url: str) -> None:
    text = "Go on, say more of it now. " * (MAX_TURN_CHARS // 27 - 1)
    async with connect(url, format=PCM) as greedy, connect(url, format=PCM) as other:
        turn = greedy.turn()
        await turn.append(text)
        for word in ("and", "some", "more", "by", "the", "word"):
            await turn.append(f" {word}")
        await turn.commit()
        said = [packet async for packet in other.say("I am still here.")]
        assert said and said[-1].is_last
        cancelled = await turn.cancel(played_ms=0)
        heard = cancelled.spoken_text + cancelled.remaining_text
        assert heard == text + " and some more by the word"
        assert [packet async for packet in greedy.say("So am I.")]


async def test_more_sessions_than_slots_are_refused_and_a_freed_slot_serves(url: str) -> None:
    async with AsyncExitStack() as sessions:
        for _ in range(NUM_SLOTS):
            await sessions.enter_async_context(await when_free(url))
        with pytest.raises(ConnectionFailed) as refused:
            async with connect(url):
                pass
        assert refused.value.status == 503 and refused.value.retry_after_s
    async with await when_free(url):
        pass


async def when_free(url: str) -> AbstractAsyncContextManager[object]:
    """An open session, as soon as the engine has given a slot back."""
    async with asyncio.timeout(20):
        while True:
            session = connect(url)
            try:
                await session.__aenter__()
            except ConnectionFailed as error:
                assert error.status == 503
                await asyncio.sleep(0.02)
                continue
            return _Entered(session)


class _Entered(AbstractAsyncContextManager[object]):
    """A context that has been entered already."""

    def __init__(self, entered: AbstractAsyncContextManager[object]) -> None:
        self._entered = entered

    async def __aexit__(self, *error: object) -> bool | None:
        return await self._entered.__aexit__(*error)  # type: ignore[arg-type]


async def test_unknown_voice(url: str) -> None:
    with pytest.raises(PlosiveError, match="af_heart"):
        async with connect(url, voice="nobody"):
            pass


def test_ready_voices_and_metrics(url: str) -> None:
    def get(path: str) -> str:
        with urllib.request.urlopen(url + path) as response:
            return str(response.read().decode())

    assert json.loads(get("/ready"))["ready"] is True
    names = {voice["name"] for voice in json.loads(get("/v1/voices"))["voices"]}
    assert {"af_heart", "am_michael", "bf_emma"} <= names
    metrics = get("/metrics")
    for name in ("sessions", "slots_free", "ttfa", "frames", "underruns"):
        assert name in metrics
