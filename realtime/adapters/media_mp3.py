"""The frame before the first of an MP3 stream, which tells a decoder what the encoder put in front.

Without it every MP3 begins with 1105 samples of silence, 46 ms at 24 kHz. FFmpeg writes it only into
files, as it also holds what is known at the end: the length. Here it holds the delay alone.
"""

import struct

_BITRATE = 64_000  # of this frame; large enough for what it holds at every rate
_RATES = ((44_100, 48_000, 32_000), (22_050, 24_000, 16_000), (11_025, 12_000, 8_000))
_DELAY_SAMPLES = 576  # of LAME; a decoder adds the 529 of its own


def info_frame(rate: int) -> bytes:
    """A silent mono frame with an Info tag, as LAME writes it: no lengths, encoder delay."""
    version = next(i for i, rates in enumerate(_RATES) if rate in rates)  # MPEG 1, 2, 2.5
    is_mpeg1 = version == 0
    header = (
        0xFFE0_0000  # sync
        | (3, 2, 0)[version] << 19
        | 0b01_1 << 16  # layer III, no checksum
        | (5 if is_mpeg1 else 8) << 12  # 64 kbit/s
        | _RATES[version].index(rate) << 10
        | 0b11 << 6  # mono
    )
    tag = b"Info" + struct.pack(">I", 0)  # neither number of frames nor bytes nor table
    lame = b"LAME3.100" + bytes(12) + (_DELAY_SAMPLES << 12).to_bytes(3, "big") + bytes(12)
    frame = struct.pack(">I", header) + bytes(17 if is_mpeg1 else 9) + tag + lame
    size = (144 if is_mpeg1 else 72) * _BITRATE // rate
    return frame.ljust(size, b"\0")
