"""Python client of Plosive: text in, audio packets out, over one WebSocket.

    async with connect("http://localhost:8765") as session:
        async for packet in session.say("Hello there."):
            ...

`Decoder` turns packets into samples, `save` writes them to a file, `Player` lets them be heard.
`clients.sync` is the same for code that blocks.
"""

from clients.decode import Decoder, decode_turn, to_int16
from clients.devices import Device, NullDevice, SoundCard
from clients.interruption import Interruption
from clients.opening import connect
from clients.options import AudioFormat, Sampling
from clients.player import Playback, Player
from clients.reconnect import Reconnect
from clients.save import save
from clients.session import Session
from clients.speech import Speech
from clients.turn import Timings, Turn
from realtime.errors import (
    CapacityError,
    ConnectionFailed,
    ConnectionLost,
    EngineError,
    PlosiveError,
    ProtocolError,
    SessionError,
    VoiceError,
)
from realtime.wire import (
    AudioPacket,
    EffectiveFormat,
    TurnCancelled,
    TurnDone,
    TurnMetrics,
    TurnStarted,
    TurnText,
    Warn,
)

__all__ = [
    "AudioFormat",
    "AudioPacket",
    "CapacityError",
    "ConnectionFailed",
    "ConnectionLost",
    "Decoder",
    "Device",
    "EffectiveFormat",
    "EngineError",
    "Interruption",
    "NullDevice",
    "Playback",
    "Player",
    "PlosiveError",
    "ProtocolError",
    "Reconnect",
    "Sampling",
    "Session",
    "SessionError",
    "SoundCard",
    "Speech",
    "Timings",
    "Turn",
    "TurnCancelled",
    "TurnDone",
    "TurnMetrics",
    "TurnStarted",
    "TurnText",
    "VoiceError",
    "Warn",
    "connect",
    "decode_turn",
    "save",
    "to_int16",
]
