"""Checkpoint files -> DualAR, with every tensor accounted for.

Weights are memory-mapped and copied once (see `model.upload`), straight into the place they are used
from. A tensor that is missing, left over or wrongly shaped is an error that names it, before the
first is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.checkpoint_files import listed, read_state
from model.config import DualARConfig
from model.dual_ar import DualAR
from model.errors import CheckpointError, ConfigError
from model.json_fields import read_json
from model.layers import Block, Stack
from model.quantized import Matrix, Quantization, matrix_shapes, read_quantization
from model.tensor_files import row_slices
from model.upload import Stored, Transfer, upload
from ops.reference_fp8 import dequantize_mxfp8

# Tables that older checkpoints store and that are computed here.
COMPUTED = frozenset({"freqs_cis", "fast_freqs_cis", "causal_mask"})
_NOTHING: Mapping[str, object] = MappingProxyType({})


class Placement(NamedTuple):
    """Where one checkpoint tensor goes."""

    name: str  # ours, see _PREFIXES
    shape: tuple[int, ...]  # as the checkpoint has it
    target: Tensor  # a view of the parameter; the tensor is broadcast to it
    dtype: torch.dtype | None = None  # that the checkpoint must have; None: bf16, f16 or f32


class Expansion(NamedTuple):
    """A matrix in a format that nothing here multiplies: it is loaded, then expanded once."""

    data: Tensor  # e4m3 [out, in]
    scale: Tensor  # u8 [out, ceil(in / 32)]
    target: Tensor  # [out, in]

    def run(self) -> None:
        """Write the values into the target."""
        for rows in row_slices(tuple(self.data.shape), 4):
            self.target[rows].copy_(dequantize_mxfp8(self.data[rows], self.scale[rows]))


def load_dual_ar(
    path: Path,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> DualAR:
    """Load a checkpoint directory.

    Args:
        path: directory with config.json, weights as `read_state` finds them, and perhaps
            tokenizer.json, which supplies token ids that config.json leaves out.
        dtype: of weights and activations, whatever the file stores.
        on_bytes: told how many bytes were read since the last call.

    Raises:
        ConfigError: if the config does not fit or token ids are unknown.
        CheckpointError: if files are missing or damaged, or tensors do not fit the config.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a directory; expected a checkpoint directory")
    config = complete_config(DualARConfig.from_file(path / "config.json"), path)
    quantization = quantization_of(path)
    state = read_state(path, quantization)
    is_quantised = quantization is not None and quantization.format == "bsgemm"
    model = new_model(path, config, state, torch.device(device), dtype, is_quantised=is_quantised)
    expansions: list[Expansion] = []
    placed = list(placements(model, state, quantization, expansions))
    upload(fit(path, state, placed), model.device, on_bytes)
    check_finite(path, [(placement.name, placement.target) for placement in placed])
    del placed, state
    while expansions:
        expansions.pop().run()
    model.finish_loading()
    return model.eval()


def new_model(
    path: Path,
    config: DualARConfig,
    state: Mapping[str, Stored],
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_quantised: bool = False,
) -> DualAR:
    """A model of the config's sizes, its weights undefined.

    Raises:
        CheckpointError: the sizes are none that these weights, or any memory, can have.
    """
    num_layers = config.slow.num_layers + config.fast.num_layers
    if num_layers > len(state):  # each has several tensors; building a million layers takes minutes
        raise CheckpointError(
            f"{path}: config.json has {num_layers} layers (n_layer), the weights are {len(state)} "
            "tensors; config and weights must come from the same checkpoint"
        )
    try:
        return DualAR(config, device, dtype, is_quantised=is_quantised)
    except (RuntimeError, TypeError, OverflowError) as error:  # what torch says of such sizes
        why = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path}: there is no room on {device} for a model of config.json's sizes ({why}); "
            "use a larger device, or the config.json that came with the weights"
        ) from error


def quantization_of(path: Path) -> Quantization | None:
    """How the matrices of a checkpoint directory are stored; None: as they are.

    Raises:
        ConfigError: config.json cannot be read, or describes what this version does not read.
    """
    file = path / "config.json"
    config = read_json(file)
    try:
        return read_quantization(config)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def complete_config(config: DualARConfig, path: Path) -> DualARConfig:
    """Fill in token ids that config.json leaves out from the tokenizer's vocabulary."""
    begin, end, end_id = config.semantic_begin_id, config.semantic_end_id, config.end_id
    if None in (begin, end, end_id) and (path / "tokenizer.json").is_file():
        vocab = _added_tokens(path / "tokenizer.json")
        last = f"<|semantic:{config.codebook_size - 1}|>"
        begin = vocab.get("<|semantic:0|>") if begin is None else begin
        end = vocab.get(last) if end is None else end
        end_id = vocab.get("<|im_end|>") if end_id is None else end_id
    complete = replace(config, semantic_begin_id=begin, semantic_end_id=end, end_id=end_id)
    if not complete.is_complete:
        raise ConfigError(
            f"{path}: token ids unknown (semantic {begin} to {end}, end {end_id}); expected them "
            "in config.json (semantic_start_token_id, semantic_end_token_id, eos_token_id) or a "
            "tokenizer.json with <|semantic:i|> and <|im_end|>"
        )
    return complete


def _added_tokens(file: Path) -> dict[str, int]:
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
        return {token["content"]: token["id"] for token in data["added_tokens"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}: is not a tokenizer ({error!r}), expected added_tokens; download it again"
        ) from error


def placements(
    model: DualAR,
    state: Mapping[str, object] = _NOTHING,
    quantization: Quantization | None = None,
    expansions: list[Expansion] | None = None,
) -> Iterator[Placement]:
    """What a checkpoint of the model holds and where it goes.

    Args:
        state: names decide between spellings of one thing; without it they are the published ones.
        expansions: gets what is left to do after loading.
    """
    layout = _Layout(state, quantization, [] if expansions is None else expansions)
    yield _whole("embeddings.weight", model.embeddings)
    yield _whole("codebook_embeddings.weight", model.codebook_embeddings)
    yield from _stack_placements("", model.slow, layout)
    if not model.config.tie_word_embeddings:
        yield _whole("output.weight", model.output)
    if model.fast.project_in is not None and model.fast.project_in_bias is not None:
        yield _whole("fast_project_in.weight", model.fast.project_in)
        yield _whole("fast_project_in.bias", model.fast.project_in_bias)
    yield _whole("fast_embeddings.weight", model.fast.embeddings)
    yield from _stack_placements("fast_", model.fast.stack, layout)
    yield _whole("fast_output.weight", model.fast.output)


class _Layout(NamedTuple):
    """What decides how a checkpoint holds a block."""

    state: Mapping[str, object]
    quantization: Quantization | None
    expansions: list[Expansion]


def _stack_placements(prefix: str, stack: Stack, layout: _Layout) -> Iterator[Placement]:
    yield _whole(prefix + "norm.weight", stack.norm)
    for layer, block in enumerate(stack.layers):
        assert isinstance(block, Block)
        yield from _block_placements(f"{prefix}layers.{layer}.", block, layout)


def _block_placements(prefix: str, block: Block, layout: _Layout) -> Iterator[Placement]:
    """The table: what a block's parameters are called in checkpoints."""
    config, state = block.config, layout.state
    yield _whole(prefix + "attention_norm.weight", block.attention_norm)
    yield _whole(prefix + "ffn_norm.weight", block.ffn_norm)
    if layout.quantization is None:
        yield _whole(prefix + "attention.wo.weight", block.wo)
        yield _whole(prefix + "feed_forward.w1.weight", block.gate_up[: config.ffn_dim])
        yield _whole(prefix + "feed_forward.w3.weight", block.gate_up[config.ffn_dim :])
        yield _whole(prefix + "feed_forward.w2.weight", block.down)
        yield from _qkv(prefix + "attention.", "weight", block.wqkv, block, state)
    else:
        for matrix, shape in matrix_shapes(block):
            yield from _quantised(prefix, matrix, shape, block, layout)
    if block.qkv_bias is not None:
        yield from _qkv(prefix + "attention.", "bias", block.qkv_bias, block, state)
    if block.o_bias is not None:
        yield _whole(prefix + "attention.wo.bias", block.o_bias)
    if block.qk_norm is not None:
        vector = (config.head_dim,)
        queries, keys = torch.split(block.qk_norm, [config.num_heads, config.num_kv_heads])
        yield Placement(prefix + "attention.q_norm.weight", vector, queries)
        yield Placement(prefix + "attention.k_norm.weight", vector, keys)


def _quantised(
    prefix: str, matrix: Matrix, shape: tuple[int, int], block: Block, layout: _Layout
) -> Iterator[Placement]:
    """A matrix and its scales. The only place where stored scales get the form that code reads:
    both are row-major here, and what multiplies them packs them (`ops.linear.pack_fp8`)."""
    quantization = layout.quantization
    assert quantization is not None, matrix
    data: Tensor = getattr(block, matrix.attribute)
    scale_shape = quantization.scale_shape(*shape)
    if quantization.format == "bsgemm":
        scale: Tensor = getattr(block, f"{matrix.attribute}_scale")
    else:
        target = data
        data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=target.device)
        scale = torch.empty(scale_shape, dtype=quantization.scale_dtype, device=target.device)
        layout.expansions.append(Expansion(data, scale, target))
    name = prefix + matrix.name
    yield Placement(name, shape, data, torch.float8_e4m3fn)
    yield Placement(f"{name}_scale", scale_shape, scale, quantization.scale_dtype)


def _qkv(
    prefix: str, kind: str, target: Tensor, block: Block, state: Mapping[str, object]
) -> Iterator[Placement]:
    """Fused wqkv, or the wq, wk, wv of older checkpoints, which are its rows in this order."""
    if f"{prefix}wq.{kind}" not in state:
        yield _whole(f"{prefix}wqkv.{kind}", target)
        return
    kv_dim = block.config.num_kv_heads * block.config.head_dim
    parts = torch.split(target, [block.config.q_dim, kv_dim, kv_dim])
    for name, part in zip(("wq", "wk", "wv"), parts, strict=True):
        yield _whole(f"{prefix}{name}.{kind}", part)


def _whole(name: str, target: Tensor) -> Placement:
    return Placement(name, tuple(target.shape), target)


def fit(path: Path, state: Mapping[str, Stored], placed: list[Placement]) -> list[Transfer]:
    """Check all tensors before the first is read."""
    expected = {placement.name for placement in placed}
    problems = [
        f"{p.name}: missing, expected shape {list(p.shape)}" for p in placed if p.name not in state
    ]
    problems += [
        f"{name}: left over with shape {list(stored.tensor.shape)}, expected no such tensor"
        for name, stored in state.items()
        if name not in expected and name not in COMPUTED
    ]
    for placement in placed:
        if placement.name in state:
            problems += _misfits(placement, state[placement.name].tensor)
    if problems:
        raise CheckpointError(
            f"{path}: {len(problems)} tensors do not fit config.json: {listed(problems, '; ')}; "
            "config and weights must come from the same checkpoint"
        )
    return [Transfer(state[placement.name], placement.target) for placement in placed]


def check_finite(where: Path, named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse weights that are no numbers: they would be served, and every voice would be noise.

    Raises:
        CheckpointError: naming the tensors that hold a NaN or an infinity.
    """
    names, finite = [], []
    for name, tensor in named:
        names.append(name)
        finite.append(_is_finite(tensor))
    if not finite or bool((all_finite := torch.stack(finite)).all()):
        return
    bad = [name for name, is_fine in zip(names, all_finite.tolist(), strict=True) if not is_fine]
    raise CheckpointError(
        f"{where}: {len(bad)} of {len(names)} tensors hold values that are no finite numbers: "
        f"{listed(bad)}; expected none; download the weights again, or ask who trained them"
    )


def _is_finite(tensor: Tensor) -> Tensor:
    """Whether all values are; bool [], where the tensor lies. Reads it once, needs no memory but for
    8-bit ones."""
    if tensor.dtype == torch.float8_e4m3fn:  # which has no infinity
        return (tensor.view(torch.uint8) & 0x7F != 0x7F).all()
    if tensor.dtype == torch.uint8:  # UE8M0
        return (tensor != 0xFF).all()
    low, high = torch.aminmax(tensor)
    return low.isfinite() & high.isfinite()


def _misfits(placement: Placement, tensor: Tensor) -> list[str]:
    if tuple(tensor.shape) != placement.shape:
        got, expected = list(tensor.shape), list(placement.shape)
        return [f"{placement.name}: got shape {got}, expected {expected}"]
    if placement.dtype is not None and tensor.dtype != placement.dtype:
        return [f"{placement.name}: got {tensor.dtype}, expected {placement.dtype}"]
    if placement.dtype is None and (not tensor.is_floating_point() or tensor.element_size() < 2):
        return [f"{placement.name}: got {tensor.dtype}, expected bf16, f16 or f32"]
    return []
