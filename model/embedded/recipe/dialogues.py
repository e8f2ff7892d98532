"""Training rows for the DualAR: a reference, then turns of the same voice, as a session's context grows.

All clips live on the device as flat token and code arrays; a row is an index into them, so a row has no padding
and a batch costs the host a few slices.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model.embedded.recipe.speakers import VOICES
from model.embedded.recipe.tokens import SEMANTIC_START, PromptTokens

HOLDOUT_EVERY = 400  # corpus rows held out
STRANGER_EVERY = 25  # invented speakers held out
MIN_FRAMES, MAX_FRAMES = 8, 400
MIN_REFERENCE_FRAMES, MAX_REFERENCE_FRAMES = 30, 130
DEFAULT_VOICE = 0  # speaks when there is no reference
NO_REFERENCE_SHARE = 0.12
NO_TARGET = -100


class Rows(NamedTuple):
    tokens: Tensor  # i64 [B, T]
    codes: Tensor  # i64 [B, T, K], zero where there is no code
    targets: Tensor  # i64 [B, T] of the next position: 0 = end, 1 + code = speech, NO_TARGET
    next_codes: Tensor  # i64 [B, T, K]


class Blocks:
    """Token sequences one after another, with their codes at the `CODE` positions."""

    def __init__(self) -> None:
        self.tokens: list[npt.NDArray] = []
        self.codes: list[npt.NDArray] = []
        self.starts: list[int] = []
        self.size = 0

    def add(self, tokens: list[int], codes: npt.NDArray) -> int:
        """tokens with `CODE` at speech positions, codes: u16 [frames, K] -> the block's number"""
        ids = np.array(tokens, np.int32)
        speech = ids == PromptTokens.CODE
        full = np.zeros((len(ids), codes.shape[1]), np.int16)
        full[speech] = codes
        ids[speech] = SEMANTIC_START + codes[:, 0]
        self.starts.append(self.size)
        self.size += len(ids)
        self.tokens.append(ids)
        self.codes.append(full)
        return len(self.starts) - 1

    def span(self, block: int) -> npt.NDArray:
        start = self.starts[block]
        return np.arange(start, start + len(self.tokens[block]), dtype=np.int32)


class Dialogues:
    def __init__(
        self,
        codes_files: list[Path],
        corpus: Path,
        prompt: PromptTokens,
        device: torch.device,
        own_share: float | None = None,
    ) -> None:
        """own_share: of the rows, for the package's voices; their share of the speech by default"""
        data = _join(codes_files)
        self.length, self.text, self.voice = data["length"], data["text"], data["voice"]
        self.prompt, self.device = prompt, device
        phonemes = [line.split("\t")[1] for line in corpus.read_text(encoding="utf-8").splitlines()]
        codes, offset = data["codes"], data["offset"]
        blocks, num_codebooks = Blocks(), codes.shape[1]
        self.turn, self.reference = [], []
        for clip, (start, length) in enumerate(zip(offset, self.length, strict=True)):
            text, frames = phonemes[self.text[clip]], slice(start, start + length)
            self.turn.append(blocks.add(prompt.turn(text, length), codes[frames]))
            heard = data["reference"][frames]
            self.reference.append(blocks.add(prompt.system(text, length), heard))
        nothing = np.zeros((0, num_codebooks), np.uint16)
        self.no_reference = blocks.add(prompt.system(None, 0), nothing)
        self.blocks = blocks
        self.tokens = torch.from_numpy(np.concatenate(blocks.tokens)).to(device)
        self.codes = torch.from_numpy(np.concatenate(blocks.codes)).to(device)
        self._split(own_share)

    def _split(self, own_share: float | None) -> None:
        held = self.text % HOLDOUT_EVERY == 0
        usable = (self.length >= MIN_FRAMES) & (self.length <= MAX_FRAMES)
        refers = (self.length >= MIN_REFERENCE_FRAMES) & (self.length <= MAX_REFERENCE_FRAMES)
        by_voice = [self.voice == v for v in range(int(self.voice.max()) + 1)]
        self.clips = [np.flatnonzero(v & ~held & usable) for v in by_voice]
        self.held_clips = [np.flatnonzero(v & held & usable) for v in by_voice]
        self.references = [np.flatnonzero(v & ~held & refers) for v in by_voice]
        voices = [v for v in range(len(by_voice)) if len(self.references[v]) and len(self.clips[v])]
        self.strangers = [v for v in voices if is_stranger(v)]
        self.voices = [v for v in voices if not is_stranger(v)]
        frames = np.array([self.length[self.clips[v]].sum() for v in self.voices], np.float64)
        self.shares = frames / frames.sum()
        own = np.array(self.voices) < len(VOICES)
        if own_share is not None and 0 < own.sum() < len(own):
            for group, share in ((own, own_share), (~own, 1 - own_share)):
                self.shares[group] *= share / self.shares[group].sum()

    def hours(self) -> float:
        return sum(int(self.length[self.clips[v]].sum()) for v in self.voices) / 25 / 3600

    def opening(self, voice: int, rng: np.random.Generator) -> tuple[int, int]:
        """The block, and the clip in it (-1: none)."""
        if voice == DEFAULT_VOICE and rng.random() < NO_REFERENCE_SHARE:
            return self.no_reference, -1
        clip = int(rng.choice(self.references[voice]))
        return self.reference[clip], clip

    def row(
        self, voice: int, num_positions: int, clips: list[npt.NDArray], rng: np.random.Generator
    ) -> tuple[npt.NDArray, int]:
        """Index of `num_positions` positions and the length of the opening. No clip is said again
        before all were, and the reference not at all: a copy teaches nothing."""
        block, reference = self.opening(voice, rng)
        spans = [self.blocks.span(block)]
        opening, size = len(spans[0]), len(spans[0])
        others = clips[voice][clips[voice] != reference]
        while size < num_positions:
            for clip in rng.permutation(others if len(others) else clips[voice]):
                spans.append(self.blocks.span(self.turn[clip]))
                size += len(spans[-1])
                if size >= num_positions:
                    break
        return np.concatenate(spans)[:num_positions], opening

    def index(self, num_rows: int, num_positions: int, rng: np.random.Generator) -> Tensor:
        """i32 [B, T + 1] into the flat arrays; a voice is as likely as its share of the speech."""
        voices = rng.choice(self.voices, num_rows, p=self.shares)
        rows = [self.row(v, num_positions + 1, self.clips, rng)[0] for v in voices]
        return torch.from_numpy(np.stack(rows))

    def held_rows(self, num_rows: int, num_positions: int) -> list[Rows]:
        """Rows of the package's voices whose turns were held out. Always the same."""
        own = [v for v in self.voices if v < len(VOICES) and len(self.held_clips[v])]
        return self._counted(own, self.held_clips, num_rows, num_positions)

    def stranger_rows(self, num_rows: int, num_positions: int) -> list[Rows]:
        """Rows of speakers that were held out as a whole. Always the same."""
        return self._counted(self.strangers, self.clips, num_rows, num_positions)

    def _counted(
        self, voices: list[int], clips: list[npt.NDArray], num_rows: int, num_positions: int
    ) -> list[Rows]:
        """The opening is context, not counted."""
        rng, result = np.random.default_rng(0), []
        for _ in range(4 if voices else 0):
            picked = [
                self.row(v, num_positions + 1, clips, rng) for v in rng.choice(voices, num_rows)
            ]
            rows = self.gather(torch.from_numpy(np.stack([index for index, _ in picked])))
            for i, (_, opening) in enumerate(picked):
                rows.targets[i, : opening - 1] = NO_TARGET
            result.append(rows)
        return result

    def gather(self, index: Tensor) -> Rows:
        """index: i32 [B, T + 1] on any device"""
        at = index.to(self.device, non_blocking=True)
        return rows_from(self.tokens[at].long(), self.codes[at].long(), self.prompt.im_end)

    def batches(
        self, shapes: list[tuple[int, int, float]], seed: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Endless (shape number, index), prepared by a thread; shapes are (rows, positions, share)."""
        queue: Queue[tuple[int, Tensor]] = Queue(maxsize=16)

        def fill(worker: int) -> None:
            rng = np.random.default_rng(seed * 100 + worker)
            shares = np.array([share for _, _, share in shapes])
            while True:
                shape = int(rng.choice(len(shapes), p=shares / shares.sum()))
                queue.put((shape, self.index(*shapes[shape][:2], rng)))

        for worker in range(2):
            threading.Thread(target=fill, args=(worker,), daemon=True).start()
        while True:
            yield queue.get()


def is_stranger(voice: int) -> bool:
    return voice >= len(VOICES) and voice % STRANGER_EVERY == STRANGER_EVERY - 1


def _join(files: list[Path]) -> dict[str, npt.NDArray]:
    """The clips of all files as one, offsets following on; references are clean where none were
    worsened."""
    parts = [dict(np.load(file)) for file in files]
    parts = [{"reference": part["codes"], **part} for part in parts]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return {**joined, "offset": np.cumsum(joined["length"]) - joined["length"]}


def rows_from(tokens: Tensor, codes: Tensor, im_end: int) -> Rows:
    """tokens: i64 [B, T + 1], codes: i64 [B, T + 1, K]: what each position sees and predicts"""
    speech = (tokens >= SEMANTIC_START).long()
    after, ends = tokens[:, 1:], speech[:, :-1].bool() & (tokens[:, 1:] == im_end)
    targets = torch.where(speech[:, 1:].bool(), after - SEMANTIC_START + 1, NO_TARGET)
    targets = torch.where(ends, 0, targets)
    return Rows(tokens[:, :-1], codes[:, :-1], targets, codes[:, 1:])
