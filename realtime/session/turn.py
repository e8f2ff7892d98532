"""One reply: its text on the way to the engine, its audio on the way to the socket."""

from realtime.pingpong.api import EngineInfo
from realtime.pingpong.messages import Command, EndTurn, SetText, SlotRef, TurnEnd
from realtime.session.actions import EncodedAudio
from realtime.session.ledger import Ledger, SpeakingRate
from realtime.session.limits import SessionLimits
from realtime.session.playback import PlaybackEstimate
from realtime.session.script import join_surrogates, whole_chars
from realtime.session.segmenter import Segment, Segmenter, SegmentPolicy
from realtime.session.settings import Settings
from realtime.wire import (
    AudioFlags,
    AudioKind,
    AudioPacket,
    EffectiveFormat,
    TurnCancelled,
    TurnMetrics,
    TurnStarted,
    TurnText,
)

_KINDS = {"opus": AudioKind.OPUS, "pcm_s16le": AudioKind.PCM_S16LE}
_TEXT_STEP_RATIO = 1 / 16  # turn.text is told when it has grown by this: bytes stay linear


class Turn:
    """Text may be added until `commit`. Nothing reaches the engine before `take_commands`."""

    def __init__(
        self,
        turn_id: int,
        settings: Settings,
        info: EngineInfo,
        limits: SessionLimits,
        rate: SpeakingRate,
        lead_in_ms: int,
    ) -> None:
        policy = SegmentPolicy(
            max_chars=info.max_segment_chars,
            min_chars=limits.min_segment_chars,
            first_clause_chars=limits.first_clause_chars,
            has_speakers=info.has_speakers,
        )
        self.turn_id = turn_id
        self.settings = settings
        self.ledger = Ledger(info.frame_ms, rate, lead_in_ms)
        self.num_chars = 0
        self.audio_ms = 0.0  # sent so far
        self.is_in_engine = False  # a command for it has been made
        self.is_audio_complete = False
        self.engine_end: TurnEnd | None = None
        self.stamps_ns: dict[str, int] = {}  # the engine's, once they are told
        self._segmenter = Segmenter(policy)
        self._new_segments: list[Segment] = []
        self._num_segments = 0  # given to the engine, closed
        self._open_text = ""  # given to the engine of the segment that is still open
        self._is_ended = False
        self.idle_since_ns: int | None = None  # no text came; None: nothing waits for more
        self._first_text_ns: int | None = None
        self._closed_ns: list[int] = []  # by segment: since when it could be spoken
        self._committed_ns: int | None = None
        self._encoded_ns: int | None = None
        self._first_packet_ns: int | None = None
        self._written_ns: int | None = None
        self._playback: PlaybackEstimate | None = None
        self._num_samples = 0
        self._num_packets = 0
        self._num_told_chars = 0

    # ------------------------------------------------------------------ text in

    @property
    def is_committed(self) -> bool:
        return self._committed_ns is not None

    def append(self, text: str, now_ns: int) -> None:
        if self._first_text_ns is None:
            self._first_text_ns = now_ns
        self.num_chars += len(text)
        self.ledger.add_text(text)
        self._take_segments(self._segmenter.append(text), now_ns)
        if text:
            self.idle_since_ns = now_ns

    def flush(self, now_ns: int) -> None:
        self.idle_since_ns = None
        self._take_segments(self._segmenter.flush(), now_ns)

    def flush_sentence(self, now_ns: int) -> None:
        """No text came for a while: what waits is closed if it ends a sentence."""
        self.idle_since_ns = None
        if self._segmenter.ends_a_sentence:
            self.flush(now_ns)

    def commit(self, now_ns: int) -> None:
        """Close what is open; idempotent."""
        if self._committed_ns is None:
            self._committed_ns = now_ns
            self.flush(now_ns)

    def take_commands(self, slot: SlotRef) -> list[Command]:
        """What the engine has not been told yet. Segments close in order, `EndTurn` comes last."""
        commands: list[Command] = []
        for segment in self._new_segments:
            commands.append(SetText(slot, self.turn_id, self._num_segments, segment.text, True))
            self._num_segments += 1
            self._open_text = ""
        self._new_segments.clear()
        open_text = self._segmenter.open_text
        if open_text and open_text != self._open_text:
            self._open_text = open_text
            commands.append(SetText(slot, self.turn_id, self._num_segments, open_text, False))
        if self.is_committed and not self._is_ended:
            self._is_ended = True
            commands.append(EndTurn(slot, self.turn_id, self._num_segments))
        self.is_in_engine = self.is_in_engine or bool(commands)
        return commands

    def _take_segments(self, segments: list[Segment], now_ns: int) -> None:
        self._new_segments += segments
        self._closed_ns += [now_ns] * len(segments)
        for segment in segments:
            self.ledger.add_segment(segment.end)

    # ------------------------------------------------------------------ audio out

    @property
    def has_audio(self) -> bool:
        return self._num_packets > 0

    def take_audio(
        self, audio: EncodedAudio, fmt: EffectiveFormat, not_before_ns: int, now_ns: int
    ) -> tuple[AudioPacket, ...]:
        """Number the packets and account for them. `not_before_ns`: earlier turns play until then."""
        if audio.num_frames:
            self.ledger.add_frames(audio.segment, audio.first_frame, audio.num_frames)
        self.is_audio_complete = audio.is_last
        packets = self._number(audio, _KINDS[fmt.codec])
        if packets:
            if self._playback is None:
                self._encoded_ns, self._first_packet_ns = audio.encoded_ns, now_ns
                self._playback = PlaybackEstimate(not_before_ns)
            self._num_samples = audio.num_samples
            self.audio_ms = 1000.0 * audio.num_samples / fmt.sample_rate
            self._playback.sent(self.audio_ms, now_ns, self._closed_ns[audio.segment])
        return packets

    def written(self, now_ns: int) -> None:
        """The socket has taken the first packet."""
        self._written_ns = self._written_ns or now_ns

    def _number(self, audio: EncodedAudio, kind: AudioKind) -> tuple[AudioPacket, ...]:
        packets = []
        for num_left, packet in zip(
            range(len(audio.packets) - 1, -1, -1), audio.packets, strict=True
        ):
            flags = AudioFlags.LAST if audio.is_last and not num_left else AudioFlags.NONE
            seq, pts, payload = self._num_packets, packet.pts_samples, packet.payload
            packets.append(AudioPacket(kind, flags, self.turn_id, seq, pts, payload))
            self._num_packets += 1
        return tuple(packets)

    @property
    def is_over(self) -> bool:
        """All audio there will be has been given to the socket."""
        end = self.engine_end
        return end is not None and (self.is_audio_complete or end.num_frames == 0)

    def playback_end_ns(self, now_ns: int) -> int:
        return self._playback.end_ns if self._playback is not None else now_ns

    def played_ms(self, claimed_ms: float | None, now_ns: int) -> float:
        """The client's clock, held to what was sent; the server's estimate if it gives none."""
        if claimed_ms is not None:
            return min(claimed_ms, self.audio_ms)
        return self._playback.played_ms(now_ns) if self._playback is not None else 0.0

    # ------------------------------------------------------------------ what the client is told

    def text_message(self) -> TurnText | None:
        """What is spoken by the end of the audio sent, if that is news worth the bytes."""
        num_chars = self.ledger.num_spoken_chars(self.audio_ms)
        num_chars = whole_chars(self.ledger.text, num_chars, self.is_committed)
        num_new = num_chars - self._num_told_chars
        is_worth_it = num_new > self._num_told_chars * _TEXT_STEP_RATIO or self.is_over
        if num_new <= 0 or not is_worth_it:
            return None
        self._num_told_chars = num_chars
        return TurnText(
            turn_id=self.turn_id,
            text=join_surrogates(self.ledger.text[:num_chars]),
            audio_ms=self.audio_ms,
        )

    def cancelled_message(self, played_ms: float) -> TurnCancelled:
        text = self.ledger.text
        num_chars = whole_chars(text, self.ledger.num_spoken_chars(played_ms), is_complete=True)
        return TurnCancelled(
            turn_id=self.turn_id,
            spoken_text=join_surrogates(text[:num_chars]),
            remaining_text=join_surrogates(text[num_chars:]),
            played_ms=played_ms,
            metrics=self.metrics(),
        )

    def started_message(self) -> TurnStarted:
        return TurnStarted(turn_id=self.turn_id, timeline_ms=self._timeline_ms(self._first_text_ns))

    def metrics(self) -> TurnMetrics:
        """So far; complete when the turn is over."""
        playback = self._playback
        is_committed = self._committed_ns is not None
        timeline_ms = self._timeline_ms(self._committed_ns if is_committed else self._first_text_ns)
        return TurnMetrics(
            num_samples=self._num_samples,
            num_packets=self._num_packets,
            num_frames=self.ledger.num_frames,
            audio_ms=self.audio_ms,
            num_segments=self._num_segments,
            server_ttfa_ms=timeline_ms.get("first_packet") if is_committed else None,
            timeline_ms=timeline_ms,
            num_underruns=playback.num_underruns if playback is not None else 0,
            worst_gap_ms=playback.worst_gap_ms if playback is not None else 0.0,
        )

    def _timeline_ms(self, origin_ns: int | None) -> dict[str, float]:
        if origin_ns is None:
            return {}
        ends_ns = {
            "first_text": self._first_text_ns,
            "encoded": self._encoded_ns,
            "first_packet": self._first_packet_ns,
            "written": self._written_ns,
        }
        stamps_ns = {**self.stamps_ns, **ends_ns}
        return {
            name: (t_ns - origin_ns) / 1e6 for name, t_ns in stamps_ns.items() if t_ns is not None
        }
