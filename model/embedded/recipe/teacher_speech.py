"""The teacher's network: utterances in, clips with the phoneme of each block out.

Batches are exact: an utterance is batched only with others of the same token count (text side) and
of the same frame count (acoustic side), so nothing is padded and every clip is what the teacher
says alone.
"""

import importlib
import io
import json
import re
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from model.embedded.recipe.speakers import TIMBRE_DIMS, Parts, Speaker
from model.embedded.recipe.teacher_files import load_weights

SAMPLE_RATE_HZ = 24_000
BLOCK_SAMPLES = 600
BLOCKS_PER_SECOND = SAMPLE_RATE_HZ // BLOCK_SAMPLES
MAX_BLOCKS = 16 * BLOCKS_PER_SECOND
LEAD_BLOCKS = 1
TAIL_BLOCKS = 5
FADE_SAMPLES = 120

MODEL_CONFIG: dict[str, Any] = {
    "dim_in": 64,
    "dropout": 0.2,
    "hidden_dim": 512,
    "max_dur": 50,
    "n_layer": 3,
    "n_mels": 80,
    "n_token": 178,
    "style_dim": 128,
    "text_encoder_kernel_size": 5,
    "istftnet": {
        "upsample_kernel_sizes": [20, 12],
        "upsample_rates": [10, 6],
        "gen_istft_hop_size": 5,
        "gen_istft_n_fft": 20,
        "resblock_dilation_sizes": [[1, 3, 5]] * 3,
        "resblock_kernel_sizes": [3, 7, 11],
        "upsample_initial_channel": 512,
    },
    "plbert": {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 2048,
        "max_position_embeddings": 512,
        "num_hidden_layers": 12,
        "dropout": 0.1,
    },
}
PRIMARY_STRESS, SECONDARY_STRESS = "ˈ", "ˌ"

T = TypeVar("T")


@dataclass(frozen=True)
class Item:
    """One utterance to be spoken."""

    row: int
    voice: int
    speed: float
    tokens: list[int]


class Clip(NamedTuple):
    """What the teacher says: `item` is the index into the items asked for."""

    item: int
    samples: npt.NDArray[np.int16]
    labels: npt.NDArray[np.uint8]


@dataclass
class _TextBatch:
    """Everything the acoustic side needs of utterances with one token count."""

    items: list[int]
    labels: torch.Tensor
    style: torch.Tensor
    speakers: list[Speaker]
    prosody: torch.Tensor
    text: torch.Tensor
    durations: torch.Tensor


def load_styles(folder: Path) -> dict[str, torch.Tensor]:
    """f32 [tokens, 256] by name"""
    with np.load(folder / "voices.npz") as tables:
        return {name: torch.from_numpy(tables[name].astype(np.float32)) for name in tables.files}


def _load_model(folder: Path, config: dict[str, Any]) -> torch.nn.Module:
    """The authors' model class, filled from weights.npz."""
    # The package's own __init__ pulls in its G2P, its logger a dependency, its STFT variant
    # another: the three modules used here need none of them.
    package = types.ModuleType("kokoro")
    package.__path__ = [str(folder / "kokoro")]
    sys.modules["kokoro"] = package
    logger = types.SimpleNamespace(debug=lambda *args, **kwargs: None)
    stubs: dict[str, dict[str, Any]] = {
        "loguru": {"logger": logger},
        "kokoro.custom_stft": {"CustomSTFT": None},
    }
    for name, attributes in stubs.items():
        stub = types.ModuleType(name)
        for key, value in attributes.items():
            setattr(stub, key, value)
        sys.modules[name] = stub
    empty = io.BytesIO()
    torch.save({}, empty)
    empty.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = importlib.import_module("kokoro.model").KModel("local", config, empty)
    for module in model.modules():
        if hasattr(module, "weight_g"):
            torch.nn.utils.remove_weight_norm(module)
    weights = load_weights(folder / "weights.npz")
    own = model.state_dict()
    # The graph has no use for the text model's pooler; InstanceNorm's affine terms keep their
    # initial 1 and 0.
    unused = re.compile(r"\.norm\.|_ids$|^bert\.pooler\.")
    missing = [key for key in own if key not in weights and not unused.search(key)]
    wrong = [key for key in own if key in weights and own[key].shape != weights[key].shape]
    if missing or wrong:
        raise SystemExit(f"teacher weights: missing {missing}, of another shape {wrong}")
    model.load_state_dict({key: weights[key] for key in own if key in weights}, strict=False)
    loaded: torch.nn.Module = model.eval()
    return loaded


class Teacher:
    """Kokoro-82M from a teacher folder, on one device, with the voices of `speakers`."""

    def __init__(self, folder: Path, device: str, speakers: Sequence[Speaker]) -> None:
        self.device = torch.device(device)
        self.vocab: dict[str, int] = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        # Any: the class comes from code that is not part of this project.
        self.model: Any = _load_model(folder, {**MODEL_CONFIG, "vocab": self.vocab}).to(self.device)
        self.speakers = speakers
        tables = load_styles(folder)
        self.tables = torch.stack(list(tables.values())).to(self.device)
        names = list(tables)
        self.timbre, self.crossed, self.prosody = (
            _weights(parts, names).to(self.device)
            for parts in zip(*((s.timbre, s.crossed, s.prosody) for s in speakers), strict=True)
        )
        self.mask = _masks(speakers).to(self.device)
        self.stress_ids = [self.vocab[PRIMARY_STRESS], self.vocab[SECONDARY_STRESS]]

    def tokens(self, phonemes: str) -> list[int]:
        return [self.vocab[char] for char in phonemes if char in self.vocab]

    @torch.inference_mode()
    def speak(
        self, items: Sequence[Item], text_batch: int = 128, batch_seconds: float = 110.0
    ) -> Iterator[Clip]:
        """Yields a clip per item, in no particular order; items of more than 16 s are left out."""
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, item in enumerate(items):
            by_length[len(item.tokens)].append(index)
        batches = [
            self._text_side([items[index] for index in chunk], chunk)
            for same in by_length.values()
            for chunk in chunks(same, text_batch)
        ]
        by_blocks: dict[int, list[tuple[_TextBatch, int]]] = defaultdict(list)
        for batch in batches:
            for row, num_blocks in enumerate(batch.durations.sum(1).tolist()):
                if num_blocks <= MAX_BLOCKS:
                    by_blocks[num_blocks].append((batch, row))
        for num_blocks in sorted(by_blocks):
            size = max(1, int(batch_seconds * BLOCKS_PER_SECOND / num_blocks))
            for rows in chunks(by_blocks[num_blocks], size):
                yield from self._acoustic_side(rows, num_blocks)

    def _text_side(self, items: Sequence[Item], indices: list[int]) -> _TextBatch:
        tokens = torch.tensor([[0, *item.tokens, 0] for item in items], device=self.device)
        # A style table has one row per number of tokens.
        num_tokens = len(items[0].tokens)
        style = self._styles([item.voice for item in items], num_tokens)
        speed = self._speeds(items)
        num_rows, length = tokens.shape
        lengths = torch.full((num_rows,), length, dtype=torch.long)
        mask = torch.zeros(num_rows, length, dtype=torch.bool, device=self.device)
        model = self.model
        hidden = model.bert_encoder(model.bert(tokens, attention_mask=(~mask).int()))
        prosody = model.predictor.text_encoder(
            hidden.transpose(-1, -2), style[:, 128:], lengths, mask
        )
        states, _ = model.predictor.lstm(prosody)
        durations = torch.sigmoid(model.predictor.duration_proj(states)).sum(-1) / speed[:, None]
        return _TextBatch(
            items=indices,
            labels=self._labels(tokens),
            style=style,
            speakers=[self.speakers[item.voice] for item in items],
            prosody=prosody,
            text=model.text_encoder(tokens, lengths, mask).transpose(1, 2),
            durations=torch.round(durations).clamp(min=1).long(),
        )

    def _styles(self, voices: Sequence[int], num_tokens: int) -> torch.Tensor:
        """f32 [voices, 256]: timbre, then prosody"""
        row = self.tables[:, min(num_tokens, self.tables.shape[1]) - 1]
        at = torch.tensor(voices, device=self.device)
        timbres, prosodies = row.split(TIMBRE_DIMS, 1)
        timbre = torch.where(self.mask[at], self.crossed[at] @ timbres, self.timbre[at] @ timbres)
        return torch.cat([timbre, self.prosody[at] @ prosodies], 1)

    def _speeds(self, items: Sequence[Item]) -> torch.Tensor:
        """f32 [items]; what a longer vocal tract slows down is spoken faster: the tempo stays."""
        factors = [item.speed * self.speakers[item.voice].tract for item in items]
        return torch.tensor(factors, device=self.device)

    def _acoustic_side(
        self, rows: Sequence[tuple[_TextBatch, int]], num_blocks: int
    ) -> Iterator[Clip]:
        prosody, text, labels = [], [], []
        for batch, row in rows:
            durations = batch.durations[row]
            index = torch.repeat_interleave(
                torch.arange(len(durations), device=self.device), durations, output_size=num_blocks
            )
            prosody.append(batch.prosody[row][index])
            text.append(batch.text[row][index])
            labels.append(batch.labels[row][index])
        style = torch.stack([batch.style[row] for batch, row in rows])
        speakers = [batch.speakers[row] for batch, row in rows]
        pitch, energy = self.model.predictor.F0Ntrain(
            torch.stack(prosody).transpose(1, 2), style[:, 128:]
        )
        factors = torch.tensor([speaker.pitch for speaker in speakers], device=self.device)
        audio = self.model.decoder(
            torch.stack(text).transpose(1, 2), pitch * factors[:, None], energy, style[:, :128]
        ).reshape(len(rows), -1)
        audio = audio[:, : num_blocks * BLOCK_SAMPLES]
        for speaker, wave_form, sounding, (batch, row) in zip(
            speakers, audio, labels, rows, strict=True
        ):
            yield _clip(batch.items[row], wave_form, sounding, speaker.tract)

    def _labels(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids with each stress mark replaced by the vowel it stands before."""
        primary, secondary = self.stress_ids
        is_stress = (tokens == primary) | (tokens == secondary)
        return torch.where(is_stress, tokens.roll(-1, dims=1), tokens)


def chunks(values: Sequence[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(values), size):
        yield list(values[start : start + size])


def _weights(parts: Sequence[Parts], names: Sequence[str]) -> torch.Tensor:
    """f32 [speakers, styles]"""
    weights = torch.zeros(len(parts), len(names))
    for row, blend in enumerate(parts):
        for name, weight in blend:
            weights[row, names.index(name)] = weight
    return weights


def _masks(speakers: Sequence[Speaker]) -> torch.Tensor:
    """bool [speakers, TIMBRE_DIMS]"""
    return torch.tensor([[bool(s.mask >> i & 1) for i in range(TIMBRE_DIMS)] for s in speakers])


def _clip(item: int, audio: torch.Tensor, labels: torch.Tensor, tract: float) -> Clip:
    """The speech in `audio` (f32 [samples]) as a speaker with another vocal tract says it;
    `labels`: i64 [blocks]"""
    blocks, labels = _stretch(audio.reshape(-1, BLOCK_SAMPLES), labels, tract)
    first, end = _speech_bounds(blocks)
    samples = (blocks[first:end].clamp(-1, 1) * 32767).to(torch.int16).cpu().numpy().reshape(-1)
    _fade(samples)
    return Clip(item, samples, labels[first:end].to(torch.uint8).cpu().numpy())


def _stretch(
    blocks: torch.Tensor, labels: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`factor` times as long and as much lower, by band-limited interpolation: `[blocks, samples]`"""
    size = round(len(blocks) * factor)
    if size == len(blocks):
        return blocks, labels
    spectrum = torch.fft.rfft(blocks.flatten())
    longer = torch.fft.irfft(spectrum, n=size * BLOCK_SAMPLES) * (size / len(blocks))
    source = ((torch.arange(size) + 0.5) * len(blocks) / size).long()
    return longer.reshape(size, BLOCK_SAMPLES), labels[source.to(labels.device)]


def _speech_bounds(blocks: torch.Tensor) -> tuple[int, int]:
    """First and end block to keep of `[blocks, samples]`: the speech, 25 ms before it and 125 ms
    after it."""
    level = blocks.square().mean(-1).sqrt()
    active = (level > 0.012 * level.max()).nonzero()[:, 0]
    if not len(active):
        return 0, len(blocks)
    first, last = int(active[0]), int(active[-1])
    return max(0, first - LEAD_BLOCKS), min(len(blocks), last + 1 + TAIL_BLOCKS)


def _fade(clip: npt.NDArray[np.int16]) -> None:
    ramp = np.linspace(0.0, 1.0, FADE_SAMPLES, dtype=np.float32)
    clip[:FADE_SAMPLES] = (clip[:FADE_SAMPLES] * ramp).astype(np.int16)
    clip[-FADE_SAMPLES:] = (clip[-FADE_SAMPLES:] * ramp[::-1]).astype(np.int16)
