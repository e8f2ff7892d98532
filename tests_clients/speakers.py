"""Scripts of servers that speak text of known length, with its times."""

from realtime.wire import (
    SessionUpdate,
    TextAppend,
    TurnCancel,
    TurnCancelled,
    TurnCommit,
    TurnStarted,
    TurnText,
)
from tests.clients.scripted_server import PACKET_SAMPLES, Peer, pcm_payloads, ready, tone


async def speaker(peer: Peer) -> None:
    """Says every turn when it is committed, two packets a word, and accounts for cancelled ones."""
    await peer.accept()
    texts: dict[int, str] = {}
    while True:
        match await peer.next():
            case TextAppend(turn_id=turn_id, text=text):
                texts[turn_id] = texts.get(turn_id, "") + text
            case TurnCommit(turn_id=turn_id):
                await say(peer, turn_id, texts[turn_id])
                num_packets = 2 * len(texts[turn_id].split())
                await peer.done(turn_id, num_packets)
            case TurnCancel(turn_id=turn_id):
                text = texts.pop(turn_id)
                await peer.send(
                    TurnCancelled(
                        turn_id=turn_id, spoken_text=text[:3], remaining_text=text[3:], played_ms=20
                    )
                )
            case SessionUpdate(voice=voice):
                await peer.send(ready(peer.format, voice or "default"))


async def say(peer: Peer, turn_id: int, text: str, num_packets: int | None = None) -> None:
    num_packets = 2 * len(text.split()) if num_packets is None else num_packets
    await peer.send(TurnStarted(turn_id=turn_id))
    await peer.audio(turn_id, pcm_payloads(tone(num_packets * PACKET_SAMPLES)))
    await peer.send(TurnText(turn_id=turn_id, text=text, audio_ms=20.0 * num_packets))
