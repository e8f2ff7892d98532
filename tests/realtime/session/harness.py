"""A session with a scripted engine behind it and a client before it. Pure, like the session.

Both check what they are told: the engine refuses commands that are stale or out of order, the
client refuses messages that the protocol does not allow.
"""

import json
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from realtime.errors import VoiceError
from realtime.pingpong.api import EngineInfo
from realtime.pingpong.messages import (
    CancelTurn,
    CloseSlot,
    EndTurn,
    OpenSlot,
    SegmentEnd,
    SetText,
    SlotReady,
    SlotRef,
    TurnBegin,
    TurnEnd,
    VoicePrompt,
)
from realtime.session.actions import (
    Action,
    Bump,
    Close,
    Drop,
    EncodedAudio,
    EncodedPacket,
    OpenEncoder,
    Send,
    SendAudio,
    Submit,
)
from realtime.session.core import Session
from realtime.session.limits import SessionLimits
from realtime.session.text_rate import TextAccount
from realtime.wire import (
    AudioPacket,
    Error,
    TurnCancelled,
    TurnDone,
    TurnStarted,
    TurnText,
    decode_server,
    encode,
)

MS = 1_000_000  # in ns
FRAME_SAMPLES = 960
FRAME_MS = 40.0
INFO = EngineInfo(
    model_name="fake",
    codec_id="tone",
    sample_rate=24_000,
    frame_samples=FRAME_SAMPLES,
    num_codebooks=8,
    num_slots=4,
    default_temperature=0.7,
    default_top_p=0.9,
    default_top_k=30,
    default_voice="anna",
    builtin_voices_path=None,
    max_segment_chars=80,
    has_prompt=True,
)
VOICES = {
    name: VoicePrompt(name, "A reference.", np.zeros((8, 3), np.int32)) for name in ("anna", "bob")
}
FRAMES_PER_CHAR = 2
FIRST_STEP_NS = 5_000_000


def find_voice(name: str) -> VoicePrompt:
    if name not in VOICES:
        raise VoiceError("voice_not_found", f"no voice {name!r}", param="voice")
    return VOICES[name]


@dataclass
class FakeTurn:
    turn_id: int
    closed: list[str] = field(default_factory=list)
    open_text: str | None = None
    num_segments: int | None = None
    segment: int = 0  # the next to speak
    num_frames: int = 0
    num_segment_frames: int = 0


class FakeEngine:
    """Speaks `FRAMES_PER_CHAR` frames a character; events leave through `in_flight`, in order."""

    def __init__(self, slot: SlotRef) -> None:
        self.slot = slot
        self.is_closed = False
        self.opened: list[OpenSlot] = []
        self.num_openings = 0  # unanswered
        self.turn: FakeTurn | None = None
        self.last: FakeTurn | None = None
        self.texts: dict[int, list[str]] = {}
        self.cancelled: list[CancelTurn] = []
        self.in_flight: deque[SlotReady | TurnBegin | EncodedAudio | SegmentEnd | TurnEnd] = deque()

    def submit(self, command: OpenSlot | SetText | EndTurn | CancelTurn | CloseSlot) -> None:
        assert not self.is_closed, command
        assert command.slot == self.slot, (command, self.slot)
        match command:
            case OpenSlot():
                assert self.turn is None, "opened during a turn"
                self.opened.append(command)
                self.num_openings = 1
            case SetText():
                self._set_text(command)
            case EndTurn():
                turn = self._turn(command.turn_id)
                assert turn.num_segments is None and command.num_segments == len(turn.closed)
                turn.num_segments = command.num_segments
            case CancelTurn():
                self._cancel(command)
            case CloseSlot():
                self.is_closed = True

    def _turn(self, turn_id: int) -> FakeTurn:
        assert self.opened, "text before the slot was opened"
        if self.turn is None:
            assert self.last is None or turn_id > self.last.turn_id
            self.turn = self.last = FakeTurn(turn_id)
            self.texts[turn_id] = self.turn.closed
        assert self.turn.turn_id == turn_id, (self.turn.turn_id, turn_id)
        return self.turn

    def _set_text(self, command: SetText) -> None:
        turn = self._turn(command.turn_id)
        assert turn.num_segments is None and command.segment == len(turn.closed), command
        assert command.text.strip() == command.text != "", command
        assert command.is_closed or command.text != turn.open_text, "nothing new"
        assert not command.is_closed or len(command.text) <= INFO.max_segment_chars
        command.text.encode()
        turn.open_text = None if command.is_closed else command.text
        if command.is_closed:
            turn.closed.append(command.text)

    def _cancel(self, command: CancelTurn) -> None:
        assert self.last is not None and self.last.turn_id == command.turn_id
        assert 0 <= command.heard_frames <= self.last.num_frames
        self.cancelled.append(command)
        self.turn = None

    def step(self) -> bool:
        """Produce the next event; False when there is nothing to do."""
        if self.is_closed:
            return False
        if self.num_openings:
            self.num_openings = 0
            self.in_flight.append(SlotReady(self.slot, 3.0, False))
            return True
        turn = self.turn
        if turn is None:
            return False
        if turn.segment < len(turn.closed):
            self._speak(turn)
        elif turn.segment == turn.num_segments:
            self._end(turn)
        else:
            return False
        return True

    def _speak(self, turn: FakeTurn) -> None:
        num_frames_wanted = FRAMES_PER_CHAR * len(turn.closed[turn.segment])
        num_frames = min(7, num_frames_wanted - turn.num_segment_frames)
        first_frame, segment = turn.num_frames, turn.segment
        if not first_frame:
            stamps_ns = {"first_step": FIRST_STEP_NS}
            self.in_flight.append(TurnBegin(self.slot, turn.turn_id, stamps_ns))
        turn.num_frames += num_frames
        turn.num_segment_frames += num_frames
        self._emit_audio(turn, segment, first_frame, num_frames, is_last=False)
        if turn.num_segment_frames == num_frames_wanted:
            self.in_flight.append(SegmentEnd(self.slot, turn.turn_id, segment, num_frames_wanted))
            turn.segment, turn.num_segment_frames = turn.segment + 1, 0

    def _end(self, turn: FakeTurn) -> None:
        if turn.num_frames:
            self._emit_audio(turn, turn.segment - 1, turn.num_frames, 0, is_last=True)
        stamps_ns = {"first_step": FIRST_STEP_NS}
        self.in_flight.append(TurnEnd(self.slot, turn.turn_id, turn.num_frames, stamps_ns))
        self.turn = None

    def _emit_audio(
        self, turn: FakeTurn, segment: int, first_frame: int, num_frames: int, is_last: bool
    ) -> None:
        """One packet a frame, each a frame late: the encoder holds the last one back."""
        before = max(0, first_frame - 1)
        after = turn.num_frames if is_last else turn.num_frames - 1
        packets = tuple(EncodedPacket(i * FRAME_SAMPLES, b"x") for i in range(before, after))
        num_samples = after * FRAME_SAMPLES
        self.in_flight.append(
            EncodedAudio(
                self.slot,
                turn.turn_id,
                segment,
                first_frame,
                num_frames,
                packets,
                is_last,
                num_samples,
            )
        )


class FakeClient:
    """Checks the order of what it is sent and remembers it."""

    def __init__(self) -> None:
        self.messages: list = []
        self.packets: dict[int, list[AudioPacket]] = {}
        self.ends: dict[int, list[str]] = {}
        self.started: set[int] = set()
        self.close: Close | None = None
        self.told: dict[int, str] = {}

    def audio(self, action: SendAudio) -> None:
        assert self.close is None and action.packets
        assert action.turn_id in self.started and action.turn_id not in self.ends
        packets = self.packets.setdefault(action.turn_id, [])
        for packet in action.packets:
            assert packet.turn_id == action.turn_id and packet.seq == len(packets)
            assert not packets or not packets[-1].is_last
            packets.append(packet)

    def message(self, message) -> None:
        assert self.close is None, message
        assert encode(decode_server(encode(message))) == encode(message)
        self.messages.append(message)
        match message:
            case TurnStarted():
                assert message.turn_id not in self.started | self.ends.keys()
                self.started.add(message.turn_id)
            case TurnText():
                assert message.turn_id not in self.ends
                assert message.text.startswith(self.told.get(message.turn_id, ""))
                self.told[message.turn_id] = message.text
            case TurnDone() | TurnCancelled():
                self.ends.setdefault(message.turn_id, []).append(message.type)
            case Error() if message.turn_id is not None and not message.keeps_turn:
                self.ends.setdefault(message.turn_id, []).append("error")


class Harness:
    def __init__(self, client_text: TextAccount | None = None, **limits: int) -> None:
        self.now_ns = 0
        self.slot = SlotRef(2, 5)
        self.engine = FakeEngine(self.slot)
        self.client = FakeClient()
        self.actions: list[Action] = []
        self.dropped: set[int] = set()
        self.session = Session(
            "s-1",
            self.slot,
            INFO,
            find_voice,
            SessionLimits(**limits),
            make_seed=lambda: 77,
            client_text=client_text,
        )

    # ------------------------------------------------------------------ the client's side

    def receive(self, message_type: str, **fields) -> list:
        """Send a client message; returns the messages that come back."""
        return self.receive_frame(json.dumps({"type": message_type, **fields}))

    def receive_frame(self, frame: str) -> list:
        return self.apply(self.session.receive_text(frame, self.now_ns))

    def start(self, **fields) -> None:
        assert self.receive("session.start", **fields) == []
        self.run()

    def say(self, turn_id: int, text: str) -> None:
        assert self.receive("text.append", turn_id=turn_id, text=text) == []
        assert self.receive("turn.commit", turn_id=turn_id) == []

    # ------------------------------------------------------------------ the engine's side

    def deliver(self) -> list:
        """Deliver the oldest event in flight."""
        return self.apply(self.session.engine_event(self.engine.in_flight.popleft(), self.now_ns))

    def run(self, num_events: int | None = None) -> list:
        """Step the engine and deliver, until idle or `num_events` have been delivered, beginnings
        of turns not counted."""
        messages: list = []
        while num_events is None or num_events > 0:
            if not self.engine.in_flight and not self.engine.step():
                break
            is_counted = not isinstance(self.engine.in_flight[0], TurnBegin)
            messages += self.deliver()
            num_events = None if num_events is None else num_events - is_counted
        return messages

    # ------------------------------------------------------------------ the server's side

    def apply(self, actions: list[Action]) -> list:
        messages = []
        for action in actions:
            self.actions.append(action)
            match action:
                case OpenEncoder():
                    assert action.slot == self.slot and not self.engine.opened
                case Bump():
                    assert action.slot == SlotRef(self.slot.idx, self.slot.generation + 1)
                    self.slot = self.engine.slot = action.slot
                case Submit():
                    self.engine.submit(action.command)
                case SendAudio():
                    assert action.turn_id not in self.dropped
                    self.client.audio(action)
                case Drop():
                    self.dropped.add(action.turn_id)
                case Close():
                    assert self.engine.is_closed and self.client.close is None
                    self.client.close = action
                case Send():
                    self.client.message(action.message)
                    messages.append(action.message)
        assert self.session.slot == self.slot
        return messages


def types(messages) -> list[str]:
    return [message.type for message in messages]


def commands(harness: Harness, kind: type) -> list:
    submitted = [a.command for a in harness.actions if isinstance(a, Submit)]
    return [command for command in submitted if isinstance(command, kind)]
