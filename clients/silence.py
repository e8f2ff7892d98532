"""Where audible sound begins."""

import numpy as np

from clients.decode import Samples

AUDIBLE_DBFS = -45.0
_WINDOW_MS = 10


def leading_silence_ms(samples: Samples, sample_rate_hz: int) -> float | None:
    """Start of the first 10 ms whose level reaches -45 dBFS; None if there is none.

    Example:
        >>> leading_silence_ms(np.r_[np.zeros(240), np.ones(240)].astype(np.float32), 24_000)
        10.0
    """
    num_window = sample_rate_hz * _WINDOW_MS // 1000
    num_windows = len(samples) // num_window
    windows = samples[: num_windows * num_window].reshape(num_windows, num_window)
    power = np.square(windows, dtype=np.float64).mean(axis=1)
    audible = np.flatnonzero(power >= 10 ** (AUDIBLE_DBFS / 10))
    return float(audible[0] * _WINDOW_MS) if len(audible) else None
