"""Rows of dialogue: which clips are spoken, after which reference, and what is held out."""

from pathlib import Path

import numpy as np
import pytest
import torch

from model.embedded.recipe.dialogues import NO_TARGET, Dialogues, rows_from
from model.embedded.recipe.tokens import SEMANTIC_START, PromptTokens, build_vocab

PROMPT = PromptTokens(build_vocab(list("abcdefgh .")))
CPU = torch.device("cpu")


@pytest.fixture
def dialogues(tmp_path: Path) -> Dialogues:
    """Two voices, twelve clips each; the texts of rows 0 and 400 are held out."""
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdefgh"), 5)) for _ in range(402)]
    (tmp_path / "corpus.tsv").write_text("".join(f"t\t{text}\n" for text in texts))
    lengths = rng.integers(31, 50, 24)
    lengths[5], lengths[7] = 4, 500  # too short and too long to be spoken
    codes = np.zeros((lengths.sum(), 8), np.uint16)
    codes[:] = np.repeat(np.arange(24), lengths)[:, None]  # the clip's number
    np.savez(
        tmp_path / "codes.npz",
        codes=codes,
        length=lengths,
        offset=np.cumsum(lengths) - lengths,
        text=np.array([0, *range(1, 12), 400, *range(12, 23)]),
        voice=np.repeat([0, 1], 12),
    )
    return Dialogues([tmp_path / "codes.npz"], tmp_path / "corpus.tsv", PROMPT, CPU)


def clips_in(rows: torch.Tensor) -> set[int]:
    """The clips (see the codes above) whose speech is in tokens."""
    return {int(token) - SEMANTIC_START for token in rows.flatten() if token >= SEMANTIC_START}


def test_rows_are_of_one_voice_and_without_what_was_held_out(dialogues: Dialogues) -> None:
    index = dialogues.index(200, 300, np.random.default_rng(0))
    rows = dialogues.gather(index)
    assert rows.tokens.shape == (200, 300) and rows.codes.shape == (200, 300, 8)
    seen = [clips_in(row) for row in rows.tokens]
    assert all(clips <= set(range(12)) or clips <= set(range(12, 24)) for clips in seen)
    assert set.union(*seen) == set(range(24)) - {0, 12, 5, 7}
    shares = np.mean([min(clips) < 12 for clips in seen])
    assert 0.4 < shares < 0.6
    speech = rows.tokens >= SEMANTIC_START
    assert bool((rows.codes[~speech] == 0).all())
    assert bool((rows.codes[speech][:, 7] == rows.tokens[speech] - SEMANTIC_START).all())


def test_only_turns_that_were_held_out_count_in_the_held_out_loss(dialogues: Dialogues) -> None:
    first, *_ = dialogues.held_rows(6, 200)
    again, *_ = dialogues.held_rows(6, 200)
    assert torch.equal(first.tokens, again.tokens)
    predicted = first.targets[first.targets > 0] - 1
    assert set(predicted.tolist()) == {0, 12}
    assert clips_in(first.tokens) - {0, 12}  # the references are others


def test_other_speakers_come_from_a_second_file_and_strangers_only_count(
    dialogues: Dialogues, tmp_path: Path
) -> None:
    """Voices 10, 23 and 24 say 4 clips each; 24 is held out as a whole, 400 as a text."""
    lengths = np.array([35, 40, 45, 50] * 3)
    codes = np.repeat(np.arange(100, 112, dtype=np.uint16), lengths)[:, None].repeat(8, 1)
    np.savez(
        tmp_path / "more.npz",
        codes=codes,
        length=lengths,
        offset=np.cumsum(lengths) - lengths,
        text=np.array([1, 2, 3, 400] * 3),
        voice=np.repeat([10, 23, 24], 4),
    )
    files = [tmp_path / "codes.npz", tmp_path / "more.npz"]
    both = Dialogues(files, tmp_path / "corpus.tsv", PROMPT, CPU)
    assert (both.voices, both.strangers) == ([0, 1, 10, 23], [24])
    rows = [
        clips_in(row) for row in both.gather(both.index(300, 300, np.random.default_rng(0))).tokens
    ]
    assert set.union(*rows) == (set(range(24)) - {0, 12, 5, 7}) | {100, 101, 102, 104, 105, 106}
    frames = [both.length[both.clips[voice]].sum() for voice in both.voices]
    share = np.mean([min(clips) >= 100 for clips in rows])
    assert share == pytest.approx((frames[2] + frames[3]) / sum(frames), abs=0.08)
    held, *_ = both.held_rows(6, 200)
    assert set((held.targets[held.targets > 0] - 1).tolist()) == {0, 12}
    strange, *_ = both.stranger_rows(6, 200)
    assert clips_in(strange.tokens) <= {108, 109, 110, 111}
    assert dialogues.stranger_rows(6, 200) == []


def test_the_voices_of_the_package_may_have_a_share_of_their_own(
    dialogues: Dialogues, tmp_path: Path
) -> None:
    """Voice 1 becomes an invented speaker."""
    with np.load(tmp_path / "codes.npz") as codes:
        other = dict(codes) | {"voice": np.repeat([0, 10], 12)}
    np.savez(tmp_path / "other.npz", **other)
    corpus = tmp_path / "corpus.tsv"
    shared = Dialogues([tmp_path / "other.npz"], corpus, PROMPT, CPU, own_share=0.2)
    assert shared.shares.tolist() == pytest.approx([0.2, 0.8])
    alone = Dialogues([tmp_path / "codes.npz"], corpus, PROMPT, CPU, own_share=0.2)
    assert alone.shares.tolist() == dialogues.shares.tolist()


def test_a_row_says_every_clip_before_it_repeats_one_and_never_its_reference(
    dialogues: Dialogues,
) -> None:
    starts = {dialogues.blocks.starts[block]: clip for clip, block in enumerate(dialogues.turn)}
    for seed in range(20):
        rng = np.random.default_rng(seed)
        index, opening = dialogues.row(1, 1200, dialogues.clips, rng)
        said = [starts[at] for at in index[opening:].tolist() if at in starts]
        reference = dialogues.reference.index(dialogues.blocks.starts.index(int(index[0])))
        others = set(dialogues.clips[1].tolist()) - {reference}
        assert len(said) > len(others)
        assert set(said[: len(others)]) == others
        assert reference not in said


def test_what_each_position_predicts() -> None:
    """Text predicts nothing, `<|voice|>` the first frame, a frame the next one, the last the end."""
    user, frames = PROMPT.user("ab"), [5, 6, 7]
    turn = [*user, *(SEMANTIC_START + code for code in frames), *PROMPT.ids("<|im_end|>", "\n")]
    tokens = torch.tensor([turn + user])
    codes = torch.where(tokens >= SEMANTIC_START, tokens - SEMANTIC_START, 0)[..., None].repeat(
        1, 1, 8
    )
    rows = rows_from(tokens, codes, PROMPT.im_end)
    nothing = [NO_TARGET] * (len(user) - 1)
    expected = [*nothing, 6, 7, 8, 0, NO_TARGET, NO_TARGET, *nothing]
    assert rows.targets[0].tolist() == expected
    assert rows.next_codes[0, len(user) - 1].tolist() == [5] * 8


def test_a_reference_may_be_worse_than_what_the_voice_says(
    dialogues: Dialogues, tmp_path: Path
) -> None:
    with np.load(tmp_path / "codes.npz") as codes:
        both = dict(codes) | {"reference": codes["codes"] + 100}
    np.savez(tmp_path / "both.npz", **both)
    files = [tmp_path / "both.npz", tmp_path / "codes.npz"]
    worse = Dialogues(files, tmp_path / "corpus.tsv", PROMPT, CPU)
    block = worse.blocks.span(worse.reference[3])
    assert clips_in(worse.tokens[block]) == {103}
    assert clips_in(worse.tokens[worse.blocks.span(worse.turn[3])]) == {3}
    later = 24 + 3  # the second file has no references of its own
    assert clips_in(worse.tokens[worse.blocks.span(worse.reference[later])]) == {3}
