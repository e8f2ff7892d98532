"""From a turn's PCM at the codec's rate to the packets of a session's format.

Frames in, 20 ms packets out: resampled where the rates differ, then Opus or headerless PCM. Nothing
of the turn is lost: what is decoded is, after the pre-skip, exactly the samples that went in, behind
the format's lead-in of silence.
"""

import numpy as np
from numpy.typing import NDArray

from realtime.opus import OpusEncoder, opus_pre_skip_samples
from realtime.resample import StreamResampler
from realtime.session.actions import EncodedPacket
from realtime.wire import PACKET_MS, AudioFormat


class AudioEncoder:
    """The encoder of one stream: `push` a turn's frames, then `finish`; `reset` to abandon it.

    `num_samples` counts the real audio in the turn's packets so far, lead-in included, at the format's
    rate: without pre-skip and the padding of the last packet. It stays readable until the next turn.
    """

    def __init__(self, audio_format: AudioFormat, codec_rate: int) -> None:
        rate = audio_format.sample_rate
        self._packet_samples = rate * PACKET_MS // 1000
        self._opus = (
            OpusEncoder(rate, audio_format.bitrate) if audio_format.codec == "opus" else None
        )
        self._pre_skip_samples = self._opus.pre_skip_samples if self._opus else 0
        self._resampler = StreamResampler(codec_rate, rate) if codec_rate != rate else None
        self._lead_in = np.zeros(rate * audio_format.lead_in_ms // 1000, np.float32)
        self._clear()

    def push(
        self, pcm: NDArray[np.float32], max_packets: int | None = None
    ) -> tuple[EncodedPacket, ...]:
        """The packets that are full after f32 [S] at the codec's rate; may be none. What
        `max_packets` holds back comes with `rest`."""
        if self._is_finished:
            self._clear()
        self._take(self._resampler.push(pcm) if self._resampler else pcm)
        return self._full_packets(max_packets)

    def rest(self) -> tuple[EncodedPacket, ...]:
        """The full packets that `push` held back."""
        return self._full_packets()

    def finish(self) -> tuple[EncodedPacket, ...]:
        """The turn's tail, at least one packet (an empty one if PCM ended on a packet's border)."""
        if self._resampler:
            self._take(self._resampler.finish())
        if self._opus:
            self._pad_opus_tail()
        packets = self._full_packets()
        if self._opus is None:
            packets += (self._packet(self._pending),)
        self._reset_codec()
        self._is_finished = True
        return packets

    def reset(self) -> None:
        """Forget the turn."""
        if self._resampler:
            self._resampler.reset()
        self._reset_codec()
        self._clear()

    def _reset_codec(self) -> None:
        if self._opus:
            self._opus.reset()

    @property
    def num_samples(self) -> int:
        return max(0, min(self._num_packed - self._pre_skip_samples, self._num_taken))

    def _clear(self) -> None:
        self._pending = self._lead_in
        self._num_taken = len(self._lead_in)  # at the format's rate
        self._num_packed = 0  # samples in packets, pre-skip and padding included
        self._is_finished = False

    def _take(self, pcm: NDArray[np.float32]) -> None:
        self._num_taken += len(pcm)
        self._pending = np.concatenate((self._pending, pcm)) if len(self._pending) else pcm

    def _pad_opus_tail(self) -> None:
        """Silence that pushes the last samples through the look-ahead and fills the packet."""
        num_tail = len(self._pending) + self._pre_skip_samples
        num_packets = -(-num_tail // self._packet_samples)
        self._pending = np.pad(
            self._pending, (0, num_packets * self._packet_samples - len(self._pending))
        )

    def _full_packets(self, max_packets: int | None = None) -> tuple[EncodedPacket, ...]:
        size = self._packet_samples
        num_full = len(self._pending) // size
        if max_packets is not None:
            num_full = min(num_full, max_packets)
        packets = tuple(
            self._packet(self._pending[i * size : (i + 1) * size]) for i in range(num_full)
        )
        self._pending = self._pending[num_full * size :]
        return packets

    def _packet(self, pcm: NDArray[np.float32]) -> EncodedPacket:
        pts_samples = self._num_packed
        self._num_packed += len(pcm)
        return EncodedPacket(pts_samples, self._opus.encode(pcm) if self._opus else to_s16le(pcm))


def pre_skip_samples(audio_format: AudioFormat) -> int:
    """What a decoder drops at the start of every turn."""
    return opus_pre_skip_samples(audio_format.sample_rate) if audio_format.codec == "opus" else 0


def to_s16le(pcm: NDArray[np.float32]) -> bytes:
    samples: NDArray[np.int16] = np.rint(np.clip(pcm, -1.0, 1.0) * 32767.0).astype("<i2")
    return samples.tobytes()
