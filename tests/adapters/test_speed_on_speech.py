"""Speed on real speech, of the embedded model: neither chipmunks nor buzz, no clicks, no holes.

Measured over all voices in `tests_clients/README.md`; here two sentences, with a margin.
"""

import numpy as np
import pytest

from tests.adapters.speech_measures import RATE, Samples, change_speed, measure, say

TEXT = "Your parcel will arrive on Thursday morning."
MOST_SPECTRAL_DB = {0.5: 2.5, 0.8: 2.5, 1.25: 2.5, 2.0: 3.5}
MOST_OFF_PITCH = {0.5: 0.25, 0.8: 0.12, 1.25: 0.06, 2.0: 0.06}
PITCH_CENTS, DIP_DB, CLICK_DB = 12.0, 9.0, 5.0


@pytest.fixture(scope="module", params=["af_heart", "am_michael"])
def speech(request: pytest.FixtureRequest, url: str) -> Samples:
    return say(url, request.param, TEXT)


@pytest.mark.parametrize("speed", MOST_SPECTRAL_DB)
def test_speech_stays_what_it_was(speech: Samples, speed: float) -> None:
    changed = change_speed(speech, speed)
    assert len(changed) == np.floor(len(speech) / speed + 0.5)
    found = measure(speech, changed, speed)
    assert found.pitch_cents < PITCH_CENTS and found.off_pitch < MOST_OFF_PITCH[speed], found
    assert found.spectral_db < MOST_SPECTRAL_DB[speed], found
    assert found.dip_db < DIP_DB and found.click_db < CLICK_DB, found


def test_the_measures_notice_what_they_are_for(speech: Samples) -> None:
    """Cheaper ways to change the speed, each with its artefact."""
    size, speed = RATE // 25, 1.25
    starts = np.arange(0, round(len(speech) / speed), size)
    pieces = [speech[round(start * speed) :][:size] for start in starts]
    assert measure(speech, np.concatenate(pieces), speed).click_db > CLICK_DB
    faded = [piece * np.hanning(len(piece)).astype(np.float32) for piece in pieces]
    assert measure(speech, np.concatenate(faded), speed).dip_db > DIP_DB
    places = np.arange(0, len(speech) - 1, speed)
    chipmunk = np.interp(places, np.arange(len(speech)), speech).astype(np.float32)
    found = measure(speech, chipmunk, speed)
    assert found.pitch_cents > 300 and found.spectral_db > MOST_SPECTRAL_DB[speed]
