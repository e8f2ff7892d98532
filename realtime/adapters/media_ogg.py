"""Opus in Ogg (RFC 7845), a page per packet, each written as soon as its packet is there.

FFmpeg's muxer holds every page back until the next one is complete: 20 ms of a listener's time.
"""

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from realtime.audio_encoder import AudioEncoder, pre_skip_samples
from realtime.session.actions import EncodedPacket
from realtime.wire import PACKET_MS, AudioFormat

_HZ = 48_000  # in which Ogg counts Opus, whatever its rate
_FIRST, _LAST = 2, 4  # page flags
_VENDOR = b"Plosive"
_SERIAL = 1
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


class OggOpusWriter:
    """One stream: exactly the samples that are written, once the decoder has dropped pre-skip."""

    def __init__(self, rate: int, bitrate: int) -> None:
        audio_format = AudioFormat(codec="opus", sample_rate=rate, bitrate=bitrate)
        self._encoder = AudioEncoder(audio_format, rate)
        self._scale = _HZ // rate
        self._pre_skip = pre_skip_samples(audio_format) * self._scale
        self._num_pages = 0
        # version, channels, pre-skip, rate of the source, gain, mapping family
        head = b"OpusHead" + struct.pack("<BBHIhB", 1, 1, self._pre_skip, rate, 0, 0)
        tags = b"OpusTags" + struct.pack("<I", len(_VENDOR)) + _VENDOR + struct.pack("<I", 0)
        self._headers = self._page(head, 0, _FIRST) + self._page(tags, 0)  # until they are written

    def write(self, pcm: NDArray[np.float32]) -> bytes:
        return self._take_headers() + b"".join(map(self._audio_page, self._encoder.push(pcm)))

    def finish(self) -> bytes:
        *others, last = self._encoder.finish()
        end = self._pre_skip + self._encoder.num_samples * self._scale
        pages = [*map(self._audio_page, others), self._page(last.payload, end, _LAST)]
        return self._take_headers() + b"".join(pages)

    def _take_headers(self) -> bytes:
        headers, self._headers = self._headers, b""
        return headers

    def _audio_page(self, packet: EncodedPacket) -> bytes:
        end = packet.pts_samples * self._scale + _HZ * PACKET_MS // 1000
        return self._page(packet.payload, end)

    def _page(self, packet: bytes, granule: int, flags: int = 0) -> bytes:
        lacing = bytes([255] * (len(packet) // 255) + [len(packet) % 255])
        start = struct.pack("<4sBBqII", b"OggS", 0, flags, granule, _SERIAL, self._num_pages)
        rest = bytes([len(lacing)]) + lacing + packet
        self._num_pages += 1
        return start + struct.pack("<I", _crc(start + bytes(4) + rest)) + rest


def _crc(page: bytes) -> int:
    """Ogg's checksum is zlib's with the bits of every byte, and of the result, the other way round;
    and it begins and ends without an inversion."""
    reversed_crc = zlib.crc32(page.translate(_REVERSED), 0xFFFF_FFFF) ^ 0xFFFF_FFFF
    return int(f"{reversed_crc:032b}"[::-1], 2)
