"""Checkpoint files -> DualAR, with every tensor accounted for.

Weights are memory-mapped and copied once (see `model.upload`), straight into the place they are used
from. A tensor that is missing, left over or wrongly shaped is an error that names it, before the
first is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.config import FLAT_SCHEMA, DualARConfig
from model.dual_ar import DualAR
from model.errors import CheckpointError, ConfigError
from model.layers import Block, Stack
from model.tensor_files import INDEX_FILE, data_offsets
from model.upload import Stored, Transfer, upload

# In this order; the second is the name inside a directory that holds several models' weights.
SINGLE_FILES = ("model.safetensors", "dual_ar.safetensors")

# Published prefix -> ours; the first that matches is applied, once. Without a match a name is
# already ours, which are those of the older flat checkpoints.
_PREFIXES = (
    ("text_model.model.", ""),
    ("audio_decoder.codebook_embeddings.", "codebook_embeddings."),
    ("audio_decoder.", "fast_"),
    ("model.", ""),
)
# Tables that older checkpoints store and that are computed here.
_COMPUTED = frozenset({"freqs_cis", "fast_freqs_cis", "causal_mask"})
_MAX_LISTED = 8
_NOTHING: Mapping[str, object] = MappingProxyType({})
_LFS_MAGIC = b"version https://git-lfs"


class Placement(NamedTuple):
    """Where one checkpoint tensor goes."""

    name: str  # ours, see _PREFIXES
    shape: tuple[int, ...]  # as the checkpoint has it
    target: Tensor  # a view of the parameter; the tensor is broadcast to it


def load_dual_ar(
    path: Path,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    end_id: int | None = None,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> DualAR:
    """Load a checkpoint directory.

    Args:
        path: directory with config.json, weights as `read_state` finds them, and perhaps
            tokenizer.json, which supplies token ids that config.json leaves out.
        dtype: of weights and activations, whatever the file stores.
        end_id: id of the end-of-speech token, where neither file says it.
        on_bytes: told how many bytes were read since the last call.

    Raises:
        ConfigError: if the config does not fit or token ids are unknown.
        CheckpointError: if files are missing or damaged, or tensors do not fit the config.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a directory; expected a checkpoint directory")
    config = _complete(DualARConfig.from_file(path / "config.json"), path, end_id)
    state = read_state(path)
    model = DualAR(config, torch.device(device), dtype)
    transfers = _fit(path, state, list(placements(model, state)))
    state.clear()
    upload(transfers, model.device, on_bytes)
    model.finish_loading()
    return model.eval()


def read_state(path: Path) -> dict[str, Stored]:
    """Memory-map all tensors of a checkpoint directory, under our names.

    Looks for a sharded checkpoint (model.safetensors.index.json), then for model.safetensors, then
    for dual_ar.safetensors; the first that exists is used.

    Raises:
        CheckpointError: if none exists, a shard is missing, a file is damaged or is a Git LFS
            pointer, or two tensors have the same name.
    """
    state: dict[str, Stored] = {}
    for file in _weight_files(path):
        for name, stored in _read_file(file):
            ours = _our_name(name)
            if ours in state:
                raise CheckpointError(f"{file}: tensor {name} is stored twice; remove one")
            state[ours] = stored
    return state


def _weight_files(path: Path) -> list[Path]:
    if (path / INDEX_FILE).is_file():
        return _shards(path / INDEX_FILE)
    for name in SINGLE_FILES:
        if (path / name).is_file():
            return [path / name]
    found = sorted(file.name for file in path.glob("*") if file.is_file()) or ["nothing"]
    raise CheckpointError(
        f"{path}: found {_listed(found)}; expected {INDEX_FILE} with its shards, or "
        f"{' or '.join(SINGLE_FILES)} (checkpoints in .pth format must be converted)"
    )


def _shards(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(_checked_head(index).read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index}: is not an index of shards ({error!r}), expected an object "
            'with "weight_map": {tensor: file}; download it again'
        ) from error
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index}: shard {name!r} lies outside the directory")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent}: {len(missing)} of {len(names)} shards missing: {_listed(missing)}; "
            "download them"
        )
    return [index.parent / name for name in names]


def _checked_head(file: Path) -> Path:
    with file.open("rb") as stream:
        if stream.read(len(_LFS_MAGIC)) == _LFS_MAGIC:
            raise CheckpointError(
                f"{file}: is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
            )
    return file


def _read_file(file: Path) -> Iterator[tuple[str, Stored]]:
    _checked_head(file)
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            offsets = data_offsets(file)
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                yield name, Stored(handle.get_tensor(name), file, offsets[name])
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: {file.stat().st_size} bytes that are not a complete safetensors file "
            f"({error}); download it again"
        ) from error


def published_name(ours: str, schema: str) -> str:
    """The name of a tensor in a checkpoint of a schema, see `model.config`."""
    if schema == FLAT_SCHEMA:
        return ours
    for prefix, replacement in _PREFIXES[1:3]:
        if ours.startswith(replacement):
            return prefix + ours.removeprefix(replacement)
    return _PREFIXES[0][0] + ours


def _our_name(name: str) -> str:
    for prefix, ours in _PREFIXES:
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def _complete(config: DualARConfig, path: Path, end_id: int | None) -> DualARConfig:
    """Fill in token ids that config.json leaves out from the tokenizer's vocabulary."""
    begin, end = config.semantic_begin_id, config.semantic_end_id
    end_id = config.end_id if end_id is None else end_id
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


def placements(model: DualAR, state: Mapping[str, object] = _NOTHING) -> Iterator[Placement]:
    """What a checkpoint of the model holds and where it goes.

    Args:
        state: names decide between spellings of one thing; without it they are the published ones.
    """
    yield _whole("embeddings.weight", model.embeddings)
    yield _whole("codebook_embeddings.weight", model.codebook_embeddings)
    yield from _stack_placements("", model.slow, state)
    if not model.config.tie_word_embeddings:
        yield _whole("output.weight", model.output)
    if model.fast.project_in is not None and model.fast.project_in_bias is not None:
        yield _whole("fast_project_in.weight", model.fast.project_in)
        yield _whole("fast_project_in.bias", model.fast.project_in_bias)
    yield _whole("fast_embeddings.weight", model.fast.embeddings)
    yield from _stack_placements("fast_", model.fast.stack, state)
    yield _whole("fast_output.weight", model.fast.output)


def _stack_placements(
    prefix: str, stack: Stack, state: Mapping[str, object]
) -> Iterator[Placement]:
    yield _whole(prefix + "norm.weight", stack.norm)
    for layer, block in enumerate(stack.layers):
        assert isinstance(block, Block)
        yield from _block_placements(f"{prefix}layers.{layer}.", block, state)


def _block_placements(
    prefix: str, block: Block, state: Mapping[str, object]
) -> Iterator[Placement]:
    """The table: what a block's parameters are called in checkpoints."""
    config = block.config
    yield _whole(prefix + "attention_norm.weight", block.attention_norm)
    yield _whole(prefix + "ffn_norm.weight", block.ffn_norm)
    yield _whole(prefix + "attention.wo.weight", block.wo)
    yield _whole(prefix + "feed_forward.w1.weight", block.gate_up[: config.ffn_dim])
    yield _whole(prefix + "feed_forward.w3.weight", block.gate_up[config.ffn_dim :])
    yield _whole(prefix + "feed_forward.w2.weight", block.down)
    yield from _qkv(prefix + "attention.", "weight", block.wqkv, block, state)
    if block.qkv_bias is not None:
        yield from _qkv(prefix + "attention.", "bias", block.qkv_bias, block, state)
    if block.o_bias is not None:
        yield _whole(prefix + "attention.wo.bias", block.o_bias)
    if block.qk_norm is not None:
        shape = (config.head_dim,)
        queries, keys = torch.split(block.qk_norm, [config.num_heads, config.num_kv_heads])
        yield Placement(prefix + "attention.q_norm.weight", shape, queries)
        yield Placement(prefix + "attention.k_norm.weight", shape, keys)


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


def _fit(path: Path, state: Mapping[str, Stored], placed: list[Placement]) -> list[Transfer]:
    """Check all tensors before the first is read."""
    expected = {placement.name for placement in placed}
    problems = [
        f"{p.name}: missing, expected shape {list(p.shape)}" for p in placed if p.name not in state
    ]
    problems += [
        f"{name}: left over with shape {list(stored.tensor.shape)}, expected no such tensor"
        for name, stored in state.items()
        if name not in expected and name not in _COMPUTED
    ]
    for placement in placed:
        if placement.name in state:
            problems += _misfits(placement, state[placement.name].tensor)
    if problems:
        raise CheckpointError(
            f"{path}: {len(problems)} tensors do not fit config.json: {_listed(problems, '; ')}; "
            "config and weights must come from the same checkpoint"
        )
    return [Transfer(state[placement.name], placement.target) for placement in placed]


def _misfits(placement: Placement, tensor: Tensor) -> list[str]:
    if tuple(tensor.shape) != placement.shape:
        got, expected = list(tensor.shape), list(placement.shape)
        return [f"{placement.name}: got shape {got}, expected {expected}"]
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        return [f"{placement.name}: got {tensor.dtype}, expected bf16, f16 or f32"]
    return []


def _listed(items: list[str], separator: str = ", ") -> str:
    more = len(items) - _MAX_LISTED
    return separator.join(items[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
