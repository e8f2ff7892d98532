"""From packets to samples, exactly: the codec's pre-skip is dropped, nothing else is."""

from collections.abc import Iterable

import av
import numpy as np
from numpy.typing import NDArray

from realtime.errors import ProtocolError
from realtime.wire import AudioKind, AudioPacket, EffectiveFormat

OPUS_OUTPUT_HZ = 48_000  # what the decoder below always gives, whatever rate was encoded

Samples = NDArray[np.float32]  # f32 [num_samples], mono, -1..1


class Decoder:
    """Streaming decoder of one turn; each turn needs its own.

    `sample_rate_hz` is the rate of what comes out: 48 kHz for Opus, else the format's.

    Example:
        decoder = Decoder(session.format)
        async for packet in session.say("Hello."):
            player.feed(decoder.decode(packet), decoder.sample_rate_hz)
    """

    def __init__(self, format: EffectiveFormat) -> None:
        self._opus = _open_opus() if format.codec == "opus" else None
        self.sample_rate_hz = OPUS_OUTPUT_HZ if self._opus else format.sample_rate
        scale, remainder = divmod(self.sample_rate_hz, format.sample_rate)
        if remainder:
            raise ProtocolError(
                "invalid_format", f"Opus at {format.sample_rate} Hz does not divide 48,000 Hz"
            )
        self.samples_per_wire_sample = scale
        self._num_to_skip = format.pre_skip_samples * scale

    def decode(self, packet: AudioPacket) -> Samples:
        """The packet's samples; empty while the pre-skip lasts.

        Raises:
            ProtocolError: code `invalid_audio`, if the payload is not what the format says.
        """
        samples = self._samples(packet)
        num_skipped = min(self._num_to_skip, len(samples))
        self._num_to_skip -= num_skipped
        return samples[num_skipped:]

    def _samples(self, packet: AudioPacket) -> Samples:
        expected = AudioKind.OPUS if self._opus else AudioKind.PCM_S16LE
        if packet.kind is not expected:
            raise _invalid(packet, f"is {packet.kind.name}, expected {expected.name}")
        if self._opus is None:
            if len(packet.payload) % 2:
                raise _invalid(packet, f"has {len(packet.payload)} bytes, not whole samples")
            pcm = np.frombuffer(packet.payload, "<i2")
        elif not packet.payload:
            raise _invalid(packet, "is empty")
        else:
            try:
                frames = self._opus.decode(av.Packet(packet.payload))
            except av.FFmpegError as error:
                raise _invalid(packet, f"is not Opus: {error.strerror}") from error
            pcm = np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames])
        return pcm.astype(np.float32) / np.float32(32768)


def decode_turn(
    packets: Iterable[AudioPacket], format: EffectiveFormat, num_samples: int | None = None
) -> tuple[Samples, int]:
    """All of a turn's audio and its rate in Hz.

    `num_samples` is `TurnMetrics.num_samples`: what follows it is the padding of the last packet.

    Example:
        packets = [packet async for packet in speech]
        samples, sample_rate_hz = decode_turn(
            packets, session.format, speech.turn.metrics.num_samples
        )

    Raises:
        ProtocolError: the packets hold less than `num_samples`, or cannot be decoded.
    """
    decoder = Decoder(format)
    parts = [decoder.decode(packet) for packet in packets]
    samples = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    if num_samples is None:
        return samples, decoder.sample_rate_hz
    expected = num_samples * decoder.samples_per_wire_sample
    if len(samples) < expected:
        raise ProtocolError(
            "audio_gap", f"the turn has {expected:,} samples, its packets hold {len(samples):,}"
        )
    return samples[:expected], decoder.sample_rate_hz


def to_int16(samples: Samples) -> NDArray[np.int16]:
    """f32 -1..1 to s16, clipped; the inverse of how s16 becomes f32 here."""
    scaled: NDArray[np.float32] = np.rint(samples * np.float32(32768))
    return scaled.clip(-32768, 32767).astype(np.int16)


def _open_opus() -> av.AudioCodecContext:
    context = av.CodecContext.create("libopus", "r")
    assert isinstance(context, av.AudioCodecContext), context
    context.sample_rate = OPUS_OUTPUT_HZ
    context.layout = "mono"
    return context


def _invalid(packet: AudioPacket, why: str) -> ProtocolError:
    return ProtocolError("invalid_audio", f"packet {packet.seq} of turn {packet.turn_id} {why}")
