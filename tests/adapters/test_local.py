"""Sessions inside the server's process: the same path as a socket's, and nothing left behind."""

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest

from realtime import wire
from realtime.adapters.local import LocalSession, open_session
from realtime.errors import CapacityError, ConnectionLost, PlosiveError
from realtime.pingpong.messages import CloseSlot, VoicePrompt
from tests.fakes import NUM_CODEBOOKS
from tests.realtime.support import TIMEOUT_S, decode, make_engine, serving

TEXT = "The quick brown fox jumps over the lazy dog. Then it sleeps until noon."
PCM = wire.SessionStart(format=wire.AudioFormat(codec="pcm_s16le", sample_rate=24_000))


async def until(session: LocalSession, kind: type) -> tuple[list[wire.AudioPacket], object]:
    packets = []
    async with asyncio.timeout(TIMEOUT_S):
        async for item in session:
            if isinstance(item, kind):
                return packets, item
            if isinstance(item, wire.AudioPacket):
                packets.append(item)
    raise AssertionError(f"no {kind.__name__}")


async def test_two_turns_are_exact(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        async with open_session(served.hub, PCM) as session:
            for turn_id in (1, 2):
                await session.append(turn_id, TEXT)
                await session.commit(turn_id)
                packets, done = await until(session, wire.TurnDone)
                expected = served.engine.pcm(0, turn_id)
                fmt = wire.EffectiveFormat(codec="pcm_s16le", sample_rate=24_000)
                got = decode(packets, fmt)
                assert isinstance(done, wire.TurnDone)
                assert len(got) == done.metrics.num_samples == len(expected)
                assert np.abs(got - expected).max() < 2 / 32767
        await served.until_free()


async def test_cancel_gives_no_stale_audio(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served, open_session(served.hub, PCM) as session:
        await session.append(1, TEXT)
        await session.commit(1)
        await until(session, wire.AudioPacket)
        await asyncio.to_thread(engine.wait_until, lambda: len(engine.emitted[0, 1]) > 20)
        for _ in range(200):  # steps of the loop, until nothing more fits between the two
            await asyncio.sleep(0)
        assert session.num_waiting > 5, "that would be heard"
        session.cancel(1, played_ms=20.0)
        packets, cancelled = await until(session, wire.TurnCancelled)
        assert not packets
        assert isinstance(cancelled, wire.TurnCancelled)
        assert cancelled.spoken_text + cancelled.remaining_text == TEXT
        await session.append(2, TEXT)
        await session.flush(2)
        await session.commit(2)
        packets, _ = await until(session, wire.TurnDone)
        assert {packet.turn_id for packet in packets} == {2}


async def test_errors_are_raised(tmp_path: Path) -> None:
    start = wire.SessionStart(voice="nobody")
    async with (
        serving(tmp_path, make_engine(tmp_path, num_slots=1)) as served,
        open_session(served.hub, start) as session,
    ):
        with pytest.raises(PlosiveError, match="there is no voice 'nobody'") as refused:
            await session.receive()
        assert refused.value.code == "voice_not_found" and not refused.value.fatal
        await session.send(PCM)  # the session is as it was
        assert isinstance(await session.receive(), wire.SessionReady)
        with pytest.raises(CapacityError):
            async with open_session(served.hub, PCM):
                pass
        served.engine.die()
        with pytest.raises(PlosiveError, match="died") as failed:
            await until(session, wire.TurnDone)
        assert failed.value.fatal
        with pytest.raises(ConnectionLost):
            await session.receive()
        with pytest.raises(ConnectionLost):
            await session.append(1, TEXT)


async def test_a_closed_session_ends_the_iteration(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, open_session(served.hub, PCM) as session:
        await session.append(1, TEXT)
        await session.commit(1)
        await session.send(wire.SessionClose())
        items = [item async for item in session]
        assert isinstance(items[-1], wire.TurnDone)
        await served.until_free()


async def test_who_does_not_take_pauses_its_own_stream(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    async with serving(tmp_path, engine) as served:
        lead = PCM.model_copy(update={"max_lead_ms": 60_000})
        async with open_session(served.hub, lead) as slow, open_session(served.hub, PCM) as other:
            await slow.append(1, TEXT * 20)
            await slow.commit(1)
            await asyncio.to_thread(engine.wait_until, lambda: bool(engine.blocked[2:]))
            slot, is_blocked = engine.blocked[-1]
            assert (slot.idx, is_blocked) == (0, True)
            await other.append(1, TEXT)
            await other.commit(1)
            await until(other, wire.TurnDone)
            packets, done = await until(slow, wire.TurnDone)
            assert isinstance(done, wire.TurnDone) and len(packets) == done.metrics.num_packets


async def test_who_receives_can_cancel_while_the_session_takes_nothing(tmp_path: Path) -> None:
    """The session waits for what it said to be received, a sender for the session."""
    async with serving(tmp_path) as served, open_session(served.hub, PCM) as session:
        sent = []

        async def send() -> None:
            for turn_id in range(1, 2_000):
                await session.commit(turn_id)
                sent.append(turn_id)

        sending = asyncio.create_task(send())
        num_sent = -1
        while num_sent != len(sent):
            num_sent = len(sent)
            await asyncio.sleep(0.2)
        assert not sending.done(), "neither side goes on"
        session.cancel(num_sent)
        async with asyncio.timeout(TIMEOUT_S):
            while not sending.done():
                with contextlib.suppress(PlosiveError):
                    await session.receive()


async def test_who_never_takes_loses_the_slot(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, write_stall_s=0.05) as served,
        open_session(served.hub, PCM) as session,
    ):
        await session.append(1, TEXT)
        await session.commit(1)
        await served.until_free()
        with pytest.raises(ConnectionLost) as lost:
            await until(session, wire.TurnDone)
        assert lost.value.close_code == 4001


@pytest.mark.parametrize("num_steps", range(6))
async def test_cancellation_at_any_step_frees_the_slot(tmp_path: Path, num_steps: int) -> None:
    async with serving(tmp_path, make_engine(tmp_path, num_slots=1)) as served:

        async def speak() -> None:
            async with open_session(served.hub, PCM) as session:
                await session.append(1, TEXT)
                await until(session, wire.TurnDone)  # never: it is not committed

        task = asyncio.create_task(speak())
        for _ in range(num_steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await served.until_free()
        assert len(served.engine.seen(CloseSlot)) == min(1, num_steps)


async def test_a_voice_of_its_own(tmp_path: Path) -> None:
    voice = VoicePrompt("inline", "what is said", np.zeros((NUM_CODEBOOKS, 9), np.int32))
    async with (
        serving(tmp_path) as served,
        open_session(served.hub, PCM, find_voice=lambda name: voice) as session,
    ):
        ready = await session.receive()
        assert isinstance(ready, wire.SessionReady) and ready.voice == "inline"


async def test_an_admitted_slot_and_long_text(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        slot = served.hub.admit()
        async with open_session(served.hub, PCM, slot=slot) as session:
            await session.append(1, "a" * (wire.MAX_TURN_CHARS + 1))
            with pytest.raises(PlosiveError) as refused:
                await until(session, wire.TurnDone)
            assert refused.value.code == "turn_too_long"
        await served.until_free()
