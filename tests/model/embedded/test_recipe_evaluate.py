"""The recipe's figures: readings of numbers, word errors, faults, intervals, the table, the clips of a server."""

import asyncio
import json
import math
import wave
from pathlib import Path

import numpy as np
import pytest

from clients import ConnectionFailed, SessionError
from model.embedded.recipe import evaluate
from model.embedded.recipe.evaluate import METRIC_RATE_HZ, Text
from model.embedded.recipe.figures import Figure, Measured, bootstrap, report
from model.embedded.recipe.word_errors import (
    MAX_READINGS,
    align,
    all_readings,
    best_alignment,
    has_repeats,
)


def errors(spoken: str, heard: str) -> int:
    return best_alignment(spoken, heard)[0].num_errors


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("Call me at 10:30.", "call me at ten thirty"),
        ("It is 9:05 now", "it is nine oh five now"),
        ("at 3:00 sharp", "at three sharp"),
        ("at 3:00 sharp", "at three o'clock sharp"),
        ("at 10.30", "at ten thirty"),
        ("at 10.30", "at ten point three zero"),
        ("7:15 p.m.", "seven fifteen pm"),
        ("That is $19.95, please.", "that is nineteen dollars and ninety five cents please"),
        ("about $1,200", "about one thousand two hundred dollars"),
        ("about 1,200 people", "about one thousand two hundred people"),
        ("about 1,200 people", "about twelve hundred people"),
        ("in 1984", "in nineteen eighty four"),
        ("in 1905", "in nineteen oh five"),
        ("room 412", "room four twelve"),
        ("room 412", "room four one two"),
        ("room 412", "room four hundred and twelve"),
        ("dial 555-0199", "dial five five five zero one nine nine"),
        ("number 84731102", "number eight four seven three one one zero two"),
        ("the 3rd of May", "the third of may"),
        ("the 21st", "the twenty first"),
        ("May 3", "may third"),
        ("up 45%", "up forty five percent"),
        ("up 4.5%", "up four point five percent"),
        ("up 45 %", "up forty five percent"),
        ("3.14 is pi", "three point one four is pi"),
        ("gate B12", "gate b twelve"),
        ("a twenty-one year lease", "a 21 year lease"),
        ("Mr. Hill & Dr. Wood", "mister hill and doctor wood"),
        ("OK, it\u2019s my favourite colour!", "okay it's my favorite color"),
        ("12 Oak St.", "twelve oak street"),
    ],
)
def test_a_number_may_be_read_in_every_usual_way(written: str, spoken: str) -> None:
    assert errors(spoken, written) == 0
    assert errors(written, spoken) == 0


@pytest.mark.parametrize(
    ("written", "spoken", "count"),
    [
        ("at 10:30", "at ten forty", 1),
        ("$19.95", "nineteen dollars and ninety six cents", 1),
        ("in 1984", "in nineteen eighty", 1),
        ("up 45%", "up forty five", 1),
        ("room 412", "room four thirteen", 1),
    ],
)
def test_another_number_is_an_error(written: str, spoken: str, count: int) -> None:
    assert errors(spoken, written) == count


def test_readings_are_limited() -> None:
    text = " ".join(["1234"] * 12)
    assert len(all_readings(text)) == MAX_READINGS
    assert all_readings("") == [[]]
    assert all_readings("?!") == [[]]


def against(reference: str, hypothesis: str) -> tuple[int, int, int]:
    return align(reference.split(), hypothesis.split())


def test_alignment_counts_every_kind_of_error() -> None:
    """(errors, words, words lost at the end)"""
    reference = "we meet at noon in the hall"
    assert against(reference, reference) == (0, 7, 0)
    assert against(reference, "we eat at noon in the hall") == (1, 7, 0)
    assert against(reference, "we meet at at noon in the hall") == (1, 7, 0)
    assert against(reference, "we meet noon in the hall") == (1, 7, 0)
    assert against(reference, "we meet at noon") == (3, 7, 3)
    assert against(reference, "") == (7, 7, 7)
    assert against("", "um") == (1, 0, 0)


def test_words_that_are_written_together_are_the_same() -> None:
    assert errors("knock down the wall", "knockdown the wall") == 0
    assert errors("the doorbell rang", "the door bell rang") == 0
    assert errors("the doorbell rang", "the door rang") == 1


def test_the_best_reading_decides() -> None:
    alignment, words = best_alignment("room four twelve is free", "Room 412 is free.")
    assert alignment == (0, 5, 0)
    assert " ".join(words) == "room four twelve is free"


def repeats(text: str, heard: str) -> bool:
    return has_repeats(text.split(), heard.split())


def test_repeats() -> None:
    text = "thank you for calling us today"
    assert not repeats(text, text)
    assert not repeats(text, "thank you for for calling us today")
    assert repeats(text, "thank you for calling for calling us today")
    assert repeats(text, f"{text} {text}")
    assert not repeats("very nice very nice indeed", "very nice very nice indeed")


# --- clips


class FakeMetrics:
    """Hears what it is told and knows voices by their pitch."""

    def __init__(self, heard: str, embedding: tuple[float, float] = (1.0, 0.0)) -> None:
        self.heard, self.embedding = heard, np.array(embedding, np.float32)

    def transcribe(self, samples) -> str:
        return self.heard

    def embed(self, samples):
        return self.embedding

    def mos(self, samples) -> tuple[float, float]:
        return 4.0, 3.0


SAID = "the meeting is on friday at noon"
TEXT = Text(SAID, "x" * 36, SAID, "agent")  # 2.3 s are expected
CENTROIDS = {"ann": np.array([1, 0], np.float32), "bob": np.array([0.6, 0.8], np.float32)}


def tone(seconds: float, lead_s: float = 0.0) -> np.ndarray:
    t = np.arange(int(seconds * METRIC_RATE_HZ)) / METRIC_RATE_HZ
    return (0.3 * np.sin(2 * np.pi * 200 * t) * (t >= lead_s)).astype(np.float32)


def measured(samples: np.ndarray, heard: str = SAID, **options) -> Measured:
    return evaluate.measure(FakeMetrics(heard, **options), samples, "ann", 3, TEXT, CENTROIDS)


@pytest.mark.parametrize(
    ("seconds", "heard", "faults"),
    [
        (2.3, SAID, []),
        (4.0, SAID, []),
        (6.0, SAID, ["runaway"]),
        (0.9, SAID, ["truncated"]),
        (2.3, "the meeting is on friday", ["truncated"]),
        (2.3, "the meeting is on friday at", []),
        (2.3, "", ["truncated"]),
        (2.3, "the meeting is on friday on friday at noon", ["repeated"]),
        (6.0, "the meeting is the meeting is the meeting is", ["runaway", "repeated"]),
    ],
)
def test_faults(seconds: float, heard: str, faults: list[str]) -> None:
    assert measured(tone(seconds), heard).faults == faults


@pytest.mark.parametrize(
    "samples", [np.zeros(0, np.float32), np.zeros(40_000, np.float32), tone(0.05), 0.01 * tone(2.0)]
)
def test_silence_is_a_fault_and_all_its_words_are_errors(samples: np.ndarray) -> None:
    clip = measured(samples)
    assert clip.faults == ["silent"]
    assert clip.num_errors == clip.num_words == 7
    assert math.isnan(clip.distill_mos) and clip.nearest == ""


def test_one_clip() -> None:
    clip = measured(tone(2.3, lead_s=0.1), "The meeting is on Sunday at noon.")
    assert (clip.voice, clip.row, clip.category, clip.text) == ("ann", 3, "agent", SAID)
    assert (clip.num_errors, clip.num_words) == (1, 7)
    assert clip.lead_ms == pytest.approx(100, abs=10)
    assert clip.duration_s == pytest.approx(2.3, abs=0.01)
    assert (clip.nearest, clip.cosine) == ("ann", pytest.approx(1.0))
    assert (clip.distill_mos, clip.dnsmos) == (4.0, 3.0)
    other = measured(tone(2.3), embedding=(0.6, 0.8))
    assert (other.nearest, other.cosine) == ("bob", pytest.approx(0.6))


def test_intervals() -> None:
    values = np.random.default_rng(0).normal(4.0, 0.5, 100).tolist()
    figure = bootstrap(values)
    assert figure == bootstrap(values)
    assert figure != bootstrap(values, seed=1)
    assert figure.value == pytest.approx(np.mean(values))
    half = 1.96 * np.std(values) / 10
    assert figure.low == pytest.approx(figure.value - half, abs=0.02)
    assert figure.high == pytest.approx(figure.value + half, abs=0.02)
    assert bootstrap([2.0] * 5) == (2.0, 2.0, 2.0)
    assert bootstrap([1.0, float("nan"), 3.0]).value == 2.0
    assert math.isnan(bootstrap([]).value) and f"{bootstrap([float('nan')]):.2f}" == "-"
    # Long sentences weigh more: 3 errors of 30 words.
    assert bootstrap([100, 200], [10, 20]).value == pytest.approx(10)
    assert f"{Figure(1.234, 1, 2):.1f}" == "1.2 [1.0, 2.0]"


CLIPS = [
    Measured("ann", 0, "agent", "a b", "a b", 0, 2, 1.0, 40.0, 4.0, 3.0, "ann", 0.9),
    Measured("ann", 1, "prose", "a b", "a", 1, 2, 1.0, 60.0, 4.5, 3.5, "bob", 0.8, ["truncated"]),
    Measured("bob", 0, "agent", "a b", "", 2, 2, 2.0, faults=["silent"]),
]


def test_the_printed_table_and_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report(CLIPS, tmp_path / "new/figures.json")
    lines = capsys.readouterr().out.splitlines()
    table = {}
    for line in lines:
        if line.startswith("| "):
            name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            table[name] = cells
    assert list(table) == ["clips", "all", "agent", "prose", "ann", "bob"]
    assert {len(cells) for cells in table.values()} == {8}
    n, wer, distill, dnsmos, nearest, cosine, lead, faults = table["all"]
    assert n == "3" and wer.startswith("50.0 [")
    assert distill.startswith("4.25 [4.00, 4.50]") and dnsmos.startswith("3.25 [")
    assert nearest.startswith("50.0 [") and cosine.startswith("0.850 [")
    assert lead == "40" and faults == "2 (1 silent, 1 truncated)"
    assert table["prose"][-1] == "1 (1 truncated)" and table["bob"][2:6] == ["-"] * 4
    worst = [line for line in lines if line.startswith("  ")]
    assert worst[0] == "  bob/0000 ['silent']: 'a b' heard as ''"
    assert len(worst) == 2  # the clip without an error is not among them
    data = json.loads((tmp_path / "new/figures.json").read_text())
    assert data["summary"]["all"]["wer_percent"]["value"] == pytest.approx(50)
    assert data["summary"]["all"]["faults"]["silent"] == 1
    assert [clip["heard"] for clip in data["clips"]] == ["a b", "a", ""]


def test_texts_and_clips_are_found(tmp_path: Path) -> None:
    (tmp_path / "texts.tsv").write_text("At 5.\tat\tAt five.\tnumbers\nSo.\tso\n")
    texts = evaluate.read_texts(tmp_path / "texts.tsv")
    assert texts == [Text("At 5.", "at", "At five.", "numbers"), Text("So.", "so", "So.", "")]
    for name in ("bob/0001.wav", "ann/0000.wav", "ann/0010.wav", "ann/notes.wav", "0003.wav"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [(voice, row) for voice, row, _ in evaluate.find_clips(tmp_path, [])]
    assert found == [("ann", 0), ("ann", 10), ("bob", 1)]
    assert [voice for voice, *_ in evaluate.find_clips(tmp_path, ["bob"])] == ["bob"]


def test_clips_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is said once, at the metric's rate; a turn that fails is a silent clip, no server an error."""
    asked = []

    async def say(url: str, voice: str, text: str):
        asked.append((url, voice, text))
        if text == "No.":
            raise SessionError("turn_failed", "the turn failed")
        return tone(0.5), 48_000

    monkeypatch.setattr(evaluate, "_say", say)
    texts = [Text(written, "x", written, "") for written in ("Yes.", "No.", "Later.")]

    def speak(limit: int = 0) -> None:
        asyncio.run(evaluate.speak_through_server("ws://x", texts, ["ann", "bob"], tmp_path, limit))

    speak(limit=2)
    assert asked == [
        ("ws://x", voice, text) for voice in ("ann", "bob") for text in ("Yes.", "No.")
    ]
    with wave.open(str(tmp_path / "ann/0000.wav")) as file:
        assert (file.getframerate(), file.getnframes()) == (24_000, 4_000)
    with wave.open(str(tmp_path / "ann/0001.wav")) as file:
        assert file.getnframes() == 0
    asked.clear()
    speak()
    assert [text for *_, text in asked] == ["Later.", "Later."]

    async def nobody(url: str, voice: str, text: str):
        raise ConnectionFailed("nobody listens there")

    monkeypatch.setattr(evaluate, "_say", nobody)
    (tmp_path / "ann/0000.wav").unlink()
    with pytest.raises(ConnectionFailed):
        speak()
    assert not (tmp_path / "ann/0000.wav").exists()


def test_a_folder_without_clips_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "texts.tsv").write_text("So.\tso\n")
    with pytest.raises(SystemExit, match=r"no clips VOICE/ROW\.wav in"):
        evaluate.main(["wavs", str(tmp_path), "--texts", str(tmp_path / "texts.tsv")])
