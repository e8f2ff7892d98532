"""Opus encoding: libopus through opuslib, one encoder per stream, no allocation per packet.

The one place that imports opuslib. It knows PCM and packets, no session and no socket.
"""

import ctypes
import ctypes.util
import importlib
import importlib.util
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realtime.errors import PlosiveError
from realtime.wire import OPUS_SAMPLE_RATES_HZ, PACKET_MS

# Measured on speech of the embedded voice at 24 kHz with libopus 1.6.1 (20 clips: DistillMOS, 4.20
# without Opus / kb/s spent / encode time per 20 ms packet):
#   bitrate   signal voice, complexity 5   signal auto, 5         signal auto, 7
#   32 kb/s   3.89 / 31 / 99 us            4.12 / 37 / 37 us
#   64 kb/s   4.06 / 62 / 112 us           4.18 / 73 / 37 us      4.16 / 70 / 51 us
# "Voice" forces the hybrid mode at these rates; left to itself libopus takes MDCT from 24 kb/s on
# and the speech modes below.
# The bitrate is what a plain signal gets. VBR gives more to frames of clear pitch, because noise
# between harmonics is heard: from 24 kb/s on 1.2 times the bitrate on average for speech, up to 1.8
# times for a steady tone of many harmonics (24 kHz; 1.4 times at 48 kHz), 2 times in a single packet.
# Constrained to the bitrate (packets of 1.5 times at most) it is as good for the bits that it spends
# (18 clips at 24 kHz, kb/s spent: distance of 40 mel bands, waveform SNR):
#   free          28.6: 1.38 dB, 14.1   38.1: 1.05, 16.4   56.9: 0.63, 20.6   75.8: 0.40, 24.2
#   constrained   32.4: 1.23 dB, 15.2   48.4: 0.79, 19.1   64.4: 0.52, 22.7   96.6: 0.25, 27.9
# So it is left free; who counts bits asks for fewer.
# `restricted_lowdelay` has 2.5 ms of look-ahead instead of 6.5 ms. That buys nothing here: a model
# frame is longer than a packet, so the first packet leaves after the first frame either way.
_APPLICATION = "audio"
_COMPLEXITY = 5
_MAX_PACKET_BYTES = 1276  # of one Opus frame (RFC 6716, section 3.4), table-of-contents included


class OpusUnavailable(PlosiveError):
    """No libopus on the system and none inside PyAV's wheel."""

    default_code = "opus_unavailable"


class OpusEncoder:
    """One mono stream of 20 ms packets. Not thread-safe; create and use it on one thread.

    VBR, its mode chosen by libopus. Neither in-band FEC nor DTX: over TCP the first is wasted bits, and the
    second makes gaps that players take for underruns.
    """

    def __init__(self, sample_rate: int, bitrate: int) -> None:
        if sample_rate not in OPUS_SAMPLE_RATES_HZ:
            raise ValueError(f"got {sample_rate} Hz; Opus is offered at {OPUS_SAMPLE_RATES_HZ} Hz")
        opuslib = load_opuslib()
        self.packet_samples = sample_rate * PACKET_MS // 1000
        self._encoder = opuslib.Encoder(sample_rate, 1, _APPLICATION)  # freed by its __del__
        self._state = self._encoder.encoder_state
        self._ctl, self._encode_float = _functions()
        self._pcm = np.zeros(self.packet_samples, np.float32)
        self._pcm_pointer = self._pcm.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        self._packet = (ctypes.c_ubyte * _MAX_PACKET_BYTES)()
        self._set(opuslib.SET_BITRATE_REQUEST, bitrate)
        self._set(opuslib.SET_COMPLEXITY_REQUEST, _COMPLEXITY)
        self._set(opuslib.SET_VBR_REQUEST, 1)
        self._set(opuslib.SET_VBR_CONSTRAINT_REQUEST, 0)
        self._reset_request: int = opuslib.RESET_STATE
        self.pre_skip_samples: int = self._encoder.lookahead

    def encode(self, pcm: NDArray[np.float32]) -> bytes:
        """Encode exactly one packet: f32 [packet_samples], within [-1, 1]."""
        self._pcm[:] = pcm
        num_bytes: int = self._encode_float(
            self._state, self._pcm_pointer, self.packet_samples, self._packet, _MAX_PACKET_BYTES
        )
        self._check(num_bytes)
        return ctypes.string_at(self._packet, num_bytes)

    def reset(self) -> None:
        """Forget the past, so that the next packet is the first of a new turn."""
        self._check(self._ctl(self._state, self._reset_request))

    def _set(self, request: int, value: int) -> None:
        self._check(self._ctl(self._state, request, ctypes.c_int(value)))

    def _check(self, result: int) -> None:
        if result < 0:
            raise load_opuslib().OpusError(result)


@cache
def opus_pre_skip_samples(sample_rate: int) -> int:
    """The look-ahead that every turn at this rate begins with."""
    return OpusEncoder(sample_rate, bitrate=32_000).pre_skip_samples


# ---------------------------------------------------------------------------- finding libopus

_IMPORT_LOCK = threading.Lock()


@cache
def load_opuslib() -> Any:
    """Import opuslib, with the libopus of the system or else the one inside PyAV's wheel.

    opuslib asks `ctypes.util.find_library("opus")` while it is being imported and fails without an
    answer. Only for that import, `find_library` is replaced by one that knows PyAV's copy and asks
    the original for every other name, so that other threads see no difference.

    Raises:
        OpusUnavailable: when there is neither.
    """
    with _IMPORT_LOCK:
        original = ctypes.util.find_library
        location = original("opus") or _find_in_pyav()
        if location is None:
            raise OpusUnavailable(
                message="found no libopus: neither on the system nor inside PyAV's wheel. "
                "Install one of them (`apt install libopus0` or `pip install av`)."
            )
        ctypes.util.find_library = lambda name: location if name == "opus" else original(name)
        try:
            return importlib.import_module("opuslib")
        finally:
            ctypes.util.find_library = original


def _find_in_pyav() -> str | None:
    """PyAV's wheels carry libopus in `av.libs` (Linux, Windows) or `av/.dylibs` (macOS)."""
    spec = importlib.util.find_spec("av")  # locates the package without importing it
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    for folder in (package.with_name("av.libs"), package / ".dylibs"):
        for path in sorted(folder.glob("libopus[-.]*")):
            return str(path)
    return None


@cache
def _functions() -> tuple[Callable[..., int], Callable[..., int]]:
    """`opus_encoder_ctl` and `opus_encode_float` with prototypes of our own.

    opuslib's `encoder_ctl` declares no arguments, which passes variadic ones wrongly on some
    platforms (macOS on arm64), and its `encode_float` allocates two buffers per packet. Indexing
    the library gives fresh function objects, so that opuslib's own stay as they are.
    """
    importlib.import_module("opuslib.api.encoder")
    api = load_opuslib().api
    state = api.encoder.EncoderPointer
    ctl = api.libopus["opus_encoder_ctl"]
    ctl.argtypes, ctl.restype = (state, ctypes.c_int), ctypes.c_int
    encode_float = api.libopus["opus_encode_float"]
    encode_float.argtypes = (
        state,
        ctypes.POINTER(ctypes.c_float),
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_ubyte),
        ctypes.c_int32,
    )
    encode_float.restype = ctypes.c_int32
    return ctl, encode_float
