"""The recipe's teacher around its network: who says what, exact batches, blocks, archives.

The network itself is a fake: a token lasts eight blocks or more, and its loudness is its number.
"""

import wave
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from model.embedded.recipe import teacher, teacher_files, teacher_speech
from model.embedded.recipe.speakers import (
    ENGLISH,
    NUM_BLENDS,
    TIMBRE_DIMS,
    UNSEEN,
    VOICES,
    Speaker,
    invent,
    plain,
)
from model.embedded.recipe.teacher_speech import BLOCK_SAMPLES, Item, Teacher

PRIMARY, SECONDARY = 8, 9
SPEAKERS = [plain(voice) for voice in VOICES]
VOCAB = {**{char: i for i, char in enumerate("abcdefg", start=1)}, "ˈ": PRIMARY, "ˌ": SECONDARY}


class FakeNetwork:
    """A tone as loud as the number of the token that sounds; token 0, at both ends, is silent."""

    def __init__(self) -> None:
        self.predictor = SimpleNamespace(F0Ntrain=self.pitch_and_energy)
        self.pitches: list[torch.Tensor] = []

    def pitch_and_energy(self, prosody, style):
        return torch.full((len(prosody), prosody.shape[2]), 100.0), None

    def decoder(self, text, pitch, energy, style):
        self.pitches.append(pitch)
        level = text[:, 0] / 20  # [clips, blocks]
        wave_form = torch.ones(BLOCK_SAMPLES) * torch.tensor([1.0, -1.0]).repeat(BLOCK_SAMPLES // 2)
        return (level[..., None] * wave_form).flatten(1)[:, None]


class FakeTeacher(Teacher):
    def __init__(self, speakers: Sequence[Speaker] = SPEAKERS) -> None:
        self.device, self.vocab, self.model = torch.device("cpu"), VOCAB, FakeNetwork()
        self.speakers = speakers
        self.stress_ids = [PRIMARY, SECONDARY]
        self.text_sizes: list[set[int]] = []
        self.acoustic_sizes: list[tuple[int, set[int]]] = []
        self.num_spoken = 0

    def _text_side(self, items, indices):
        self.text_sizes.append({len(item.tokens) for item in items})
        assert len(items) == len(indices)
        tokens = torch.tensor([[0, *item.tokens, 0] for item in items])
        return teacher_speech._TextBatch(
            items=indices,
            labels=self._labels(tokens),
            style=torch.zeros(len(items), 256),
            speakers=[self.speakers[item.voice] for item in items],
            prosody=tokens[..., None].float(),
            text=tokens[..., None].float(),
            durations=tokens.clamp(min=8),
        )

    def _acoustic_side(self, rows, num_blocks):
        lengths = {int(batch.durations[row].sum()) for batch, row in rows}
        self.acoustic_sizes.append((len(rows), lengths))
        self.num_spoken += len(rows)
        yield from super()._acoustic_side(rows, num_blocks)


def some_items(count: int) -> list[Item]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 7, count)
    return [
        Item(row, row % 3, 1.0, rng.integers(1, 8, size).tolist())
        for row, size in enumerate(lengths)
    ]


def test_plan_gives_every_row_to_one_voice() -> None:
    rows = [(f"text {i}", "abc") for i in range(100)]
    items = teacher.plan(rows, FakeTeacher(), 1, range(10))
    assert sorted(item.row for item in items) == list(range(100))
    assert set(Counter(item.voice for item in items).values()) == {10}
    assert all(teacher.MIN_SPEED <= item.speed <= teacher.MAX_SPEED for item in items)
    assert len({item.speed for item in items}) > 50
    assert items == teacher.plan(rows, FakeTeacher(), 1, range(10))
    assert [i.row for i in items] != [
        i.row for i in teacher.plan(rows, FakeTeacher(), 2, range(10))
    ]


def test_plan_leaves_out_what_is_too_short_or_too_long() -> None:
    rows = [("one", "ab"), ("two", "abc"), ("three", "a" * 260), ("four", "a" * 261), ("x", "xyz")]
    items = teacher.plan(rows, FakeTeacher(), 0, range(10))
    assert sorted(item.row for item in items) == [1, 2]
    assert next(item.tokens for item in items if item.row == 1) == [1, 2, 3]


def test_plan_goes_on_after_what_was_spoken_with_other_speakers() -> None:
    rows = [(f"text {i}", "abc") for i in range(60)]
    items = teacher.plan(rows, FakeTeacher(), 1, range(10, 15), spoken=frozenset(range(0, 60, 2)))
    assert sorted(item.row for item in items) == list(range(1, 60, 2))
    assert Counter(item.voice for item in items) == dict.fromkeys(range(10, 15), 6)


NAMES = [*VOICES, *UNSEEN, "zf_a", "zm_b", "zf_c", "zm_d"]


def test_invented_speakers_are_new_and_know_no_stranger() -> None:
    speakers = invent(NAMES, 300, seed=1)
    assert speakers == invent(NAMES, 300, seed=1) != invent(NAMES, 300, seed=2)
    assert speakers[:20] == invent(NAMES, 20, seed=1)
    assert len(set(speakers)) == 300
    used = {name for s in speakers for name, _ in (*s.timbre, *s.prosody)}
    assert used == set(NAMES) - set(UNSEEN)
    for speaker in speakers:
        names, weights = zip(*speaker.timbre, strict=True)
        assert sum(weights) == pytest.approx(1) and min(weights) >= 0
        assert len(set(names)) == len(names) <= 3
        ((prosody, weight),) = speaker.prosody
        assert prosody[0] in ENGLISH and weight == 1
        assert 0.89 < speaker.pitch < 1.13 and 0.9 <= speaker.tract <= 1.1
    mixed = [s for s in speakers if len({name[1] for name, _ in s.timbre}) > 1]
    assert 0 < len(mixed) < 60


def test_later_speakers_are_crossed_and_the_first_stay_as_they_are() -> None:
    speakers = invent(NAMES, NUM_BLENDS + 200, seed=1)
    blends, crossed = speakers[:NUM_BLENDS], speakers[NUM_BLENDS:]
    assert blends == invent(NAMES, NUM_BLENDS, seed=1)
    assert not any(s.crossed or s.mask for s in blends)
    for speaker in crossed:
        assert speaker.timbre[0][0] != speaker.crossed[0][0]
        assert sum(weight for _, weight in speaker.crossed) == pytest.approx(1)
    assert {name for s in crossed for name, _ in s.crossed} == set(NAMES) - set(UNSEEN)
    counts = [s.mask.bit_count() for s in crossed]
    assert min(counts) > 10 and max(counts) < 90 and 40 < np.mean(counts) < 56
    assert all(0 < s.mask < 1 << TIMBRE_DIMS for s in crossed)


def test_a_crossed_timbre_has_the_masked_dimensions_of_the_second() -> None:
    speaker = Speaker((("a", 1.0),), (("a", 1.0),), crossed=(("b", 1.0),), mask=0b110)
    fake = FakeTeacher()
    set_styles(fake, [plain("a"), speaker], ["a", "b"])
    fake.tables = torch.stack([torch.full((5, 256), 4.0), torch.full((5, 256), 8.0)])
    style = fake._styles([1, 0], 3)
    assert style[0].tolist() == [4.0, 8.0, 8.0] + [4.0] * 253
    assert style[1].tolist() == [4.0] * 256


def set_styles(fake: FakeTeacher, speakers: list[Speaker], names: list[str]) -> None:
    fake.timbre = teacher_speech._weights([s.timbre for s in speakers], names)
    fake.crossed = teacher_speech._weights([s.crossed for s in speakers], names)
    fake.prosody = teacher_speech._weights([s.prosody for s in speakers], names)
    fake.mask = teacher_speech._masks(speakers)


def test_styles_are_blended_half_by_half() -> None:
    speaker = Speaker((("a", 0.25), ("b", 0.75)), (("b", 1.0),))
    fake = FakeTeacher()
    set_styles(fake, [plain("a"), speaker], ["a", "b"])
    fake.tables = torch.stack([torch.full((5, 256), 4.0), torch.full((5, 256), 8.0)])
    fake.tables[:, 2] += 1  # a row per number of tokens
    style = fake._styles([1, 0], 3)
    assert style[0].tolist() == [8.0] * 128 + [9.0] * 128
    assert style[1].tolist() == [5.0] * 256
    assert fake._styles([1], 99)[0].tolist() == [7.0] * 128 + [8.0] * 128


def test_a_speaker_has_its_own_pitch_and_vocal_tract() -> None:
    """With a tract 1.5 times as long every sound lasts as much longer."""
    fake = FakeTeacher([plain("a"), Speaker((), (), pitch=1.25, tract=1.5)])
    same, other = fake.speak([Item(0, 0, 1.0, [1, 2, 3]), Item(0, 1, 1.0, [1, 2, 3])])
    assert [row[0].item() for row in fake.model.pitches[0]] == [100.0, 125.0]
    assert len(other.samples) == len(other.labels) * BLOCK_SAMPLES
    assert fake._speeds([Item(0, 0, 1.1, []), Item(0, 1, 1.1, [])]).tolist() == pytest.approx(
        [1.1, 1.65]
    )
    counts = [Counter(clip.labels.tolist()) for clip in (same, other)]
    assert all(counts[1][token] == 1.5 * counts[0][token] > 0 for token in (1, 2, 3))


def test_a_stretched_tone_is_lower_and_as_loud() -> None:
    time = torch.arange(40 * BLOCK_SAMPLES) / teacher_speech.SAMPLE_RATE_HZ
    tone = torch.sin(2 * torch.pi * 1100 * time).reshape(40, BLOCK_SAMPLES)
    blocks, labels = teacher_speech._stretch(tone, torch.arange(40), 1.1)
    assert blocks.shape == (44, BLOCK_SAMPLES) and labels.unique().tolist() == list(range(40))
    time = torch.arange(44 * BLOCK_SAMPLES) / teacher_speech.SAMPLE_RATE_HZ
    wanted = torch.sin(2 * torch.pi * 1000 * time)
    assert float((blocks.flatten() - wanted).abs().max()) < 2e-3


def test_batches_are_of_equal_lengths_and_every_item_is_said_once() -> None:
    fake, items = FakeTeacher(), some_items(200)
    clips = list(fake.speak(items, text_batch=7, batch_seconds=10))
    assert sorted(clip.item for clip in clips) == list(range(200))
    assert all(len(sizes) == 1 for sizes in fake.text_sizes)
    assert len(fake.text_sizes) == sum(
        -(-n // 7) for n in Counter(len(i.tokens) for i in items).values()
    )
    for size, lengths in fake.acoustic_sizes:
        assert len(lengths) == 1
        assert size * next(iter(lengths)) <= 10 * teacher_speech.BLOCKS_PER_SECOND
    assert max(size for size, _ in fake.acoustic_sizes) > 1


def test_a_clip_in_a_batch_is_the_clip_alone() -> None:
    items = some_items(30)
    together = {clip.item: clip for clip in FakeTeacher().speak(items)}
    for index, item in enumerate(items):
        (alone,) = FakeTeacher().speak([item])
        assert np.array_equal(together[index].samples, alone.samples)
        assert np.array_equal(together[index].labels, alone.labels)


def test_items_of_more_than_16_seconds_are_left_out() -> None:
    at_most = Item(0, 0, 1.0, [7] * (teacher_speech.MAX_BLOCKS // 8 - 2))
    too_long = Item(1, 0, 1.0, [7] * (teacher_speech.MAX_BLOCKS // 8 - 1))
    assert [clip.item for clip in FakeTeacher().speak([at_most, too_long])] == [0]


def test_silence_is_trimmed_and_each_block_names_its_phoneme() -> None:
    """8 silent blocks, 8 of each token, 8 silent ones; 1 block is kept before and 5 after."""
    (clip,) = FakeTeacher().speak([Item(0, 0, 1.0, [PRIMARY, 2, SECONDARY, 3])])
    durations = [1, PRIMARY, 8, SECONDARY, 8, 5]
    assert len(clip.labels) == sum(durations)
    assert len(clip.samples) == sum(durations) * BLOCK_SAMPLES
    # A stress mark counts as the vowel behind it.
    assert clip.labels.tolist() == [0] + [2] * (PRIMARY + 8) + [3] * (SECONDARY + 8) + [0] * 5
    assert not clip.samples[:BLOCK_SAMPLES].any()
    assert clip.samples[BLOCK_SAMPLES:].any()


def test_ends_fade() -> None:
    clip = np.full(1000, 1000, np.int16)
    teacher_speech._fade(clip)
    assert clip[0] == clip[-1] == 0
    assert (np.diff(clip[:120]) >= 0).all() and (np.diff(clip[-120:]) <= 0).all()
    assert (clip[120:-120] == 1000).all()


def generate(fake: Teacher, items: list[Item], out: Path, limit_s: float = 1e9) -> None:
    teacher.generate(
        fake,
        items,
        out,
        shard=1,
        seed=3,
        first_block=4,
        block=10,
        batch_seconds=10,
        limit_s=limit_s,
    )


def test_blocks_hold_every_item_once(tmp_path: Path) -> None:
    items = some_items(30)
    generate(FakeTeacher(), items, tmp_path)
    sizes, rows = [], []
    for number in range(4):
        info = np.load(tmp_path / f"m1_{number}.npy")
        labels = np.load(tmp_path / f"l1_{number}.npy")
        audio = np.load(tmp_path / f"a1_{number}.npy")
        assert info.dtype == np.int32 and labels.dtype == np.uint8 and audio.dtype == np.int16
        assert info[:, 3].sum() == len(labels) == len(audio) // BLOCK_SAMPLES
        assert all(items[row].voice == voice for row, voice, *_ in info)
        assert (info[:, 2] == 1000).all()
        sizes.append(len(info))
        rows += info[:, 0].tolist()
    assert sizes == [4, 10, 10, 6]
    assert sorted(rows) == list(range(30))
    assert (tmp_path / "done1").exists()
    assert not list(tmp_path.glob(".a*"))


def test_a_second_run_makes_only_what_is_missing(tmp_path: Path) -> None:
    items = some_items(30)
    generate(FakeTeacher(), items, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "a1_2.npy").unlink()
    fake = FakeTeacher()
    generate(fake, items, tmp_path)
    assert fake.num_spoken == 10
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_run_that_is_out_of_time_is_not_done(tmp_path: Path) -> None:
    generate(FakeTeacher(), some_items(30), tmp_path, limit_s=-1)
    assert list(tmp_path.iterdir()) == []


def test_say(tmp_path: Path) -> None:
    rows = [("A bad bag.", "abc"), ("A cab.", "defg")]
    kept = tmp_path / "af_heart/0001.wav"
    kept.parent.mkdir()
    kept.write_bytes(b"as it was")
    teacher.say(FakeTeacher(), rows, ["af_heart", "bf_emma"], tmp_path, seed=1)
    assert (tmp_path / "texts.tsv").read_text() == "A bad bag.\tabc\nA cab.\tdefg\n"
    assert kept.read_bytes() == b"as it was"
    for name in ("af_heart/0000", "bf_emma/0000", "bf_emma/0001"):
        with wave.open(str(tmp_path / f"{name}.wav")) as file:
            assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
            assert file.getnframes() >= 24 * BLOCK_SAMPLES


# --- archives and weights


@pytest.fixture
def packed(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "teacher"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(np.random.default_rng(0).bytes(5000))
    (folder / "NOTICE").write_text("Apache-2.0")
    parts = [tmp_path / "one", tmp_path / "two"]
    teacher_files.pack([folder], "teacher", parts)
    return parts


def test_archives_come_back_as_they_were(tmp_path: Path, packed: list[Path]) -> None:
    teacher_files.unpack(packed, tmp_path / "out")
    for name in ("weights.bin", "NOTICE"):
        made = (tmp_path / "out/teacher" / name).read_bytes()
        assert made == (tmp_path / "teacher" / name).read_bytes()
    sizes = [path.stat().st_size for folder in packed for path in folder.glob("*.xz.*")]
    assert len(sizes) == 2 and abs(sizes[0] - sizes[1]) <= 1


def test_a_damaged_archive_is_named_and_not_extracted(tmp_path: Path, packed: list[Path]) -> None:
    part = packed[1] / "teacher.tar.xz.2of2"
    data = bytearray(part.read_bytes())
    data[100] ^= 1
    part.write_bytes(data)
    with pytest.raises(
        SystemExit, match=r"teacher\.tar\.xz\.2of2.*do not match the checksum of teach"
    ):
        teacher_files.unpack(packed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_part_is_an_error(tmp_path: Path, packed: list[Path]) -> None:
    with pytest.raises(SystemExit, match="do not match the checksum of teacher"):
        teacher_files.unpack(packed[:1], tmp_path / "out")
    with pytest.raises(SystemExit, match="no packed archives"):
        teacher_files.unpack([tmp_path / "teacher"], tmp_path / "out")


def test_weights_are_dequantised(tmp_path: Path) -> None:
    values = np.array([[0, 128, 255], [1, 2, 3]], np.uint8)
    zero, scale = np.array([[128], [2]], np.uint8), np.array([[0.5], [2.0]], np.float32)
    state = {
        "layer.weight": teacher_files.Quantized(values, zero, scale),
        "bias": np.ones(3, np.float32),
    }
    teacher_files.save_weights(state, tmp_path / "weights.npz")
    loaded = teacher_files.load_weights(tmp_path / "weights.npz")
    assert set(loaded) == {"layer.weight", "bias"}
    assert loaded["layer.weight"].tolist() == [[-64.0, 0.0, 63.5], [-2.0, 0.0, 2.0]]
    assert loaded["bias"].tolist() == [1.0, 1.0, 1.0]


def test_names_and_gates_of_the_graph() -> None:
    assert teacher_files._module_path("/encoder/F0.1/conv1/Conv") == "predictor.F0.1.conv1"
    assert (
        teacher_files._module_path("/decoder/decoder/encode/conv1/Conv") == "decoder.encode.conv1"
    )
    shared = "/encoder/bert/encoder/albert_layer_groups.0/albert_layers.0/ffn_3/MatMul"
    assert teacher_files._module_path(shared).endswith("albert_layers.0.ffn")
    gates = np.arange(8).reshape(8, 1)  # i i o o f f c c
    assert teacher_files._torch_gates(gates)[:, 0].tolist() == [0, 1, 4, 5, 6, 7, 2, 3]
