"""What a quantised checkpoint is: its formats, what it says about itself, the names of its tensors.

The four matrices of every block are e4m3 [out, in], in the form that decoding runs: `wqkv`, `wo`,
`w13` (gate over up) and `w2`. Beside each lies `weight_scale`, contiguous and row-major:

| format   | values that share a scale | scale                                              |
|----------|---------------------------|----------------------------------------------------|
| `bsgemm` | 128 x 128                 | f32 [ceil(out/128), ceil(in/128)]                  |
| `mxfp8`  | 1 x 32                    | u8 [out, ceil(in/32)], UE8M0: the exponent plus 127 |

value = data * scale. `mxfp8` is expanded to bf16 on loading: the kernel for it (Blackwell) is compiled,
never run. Embeddings, norms, heads, biases and the projection between the stacks are as in
the source. The description is in config.json (`plosive_quantization`) and in every weight file, so
that files of two checkpoints are not taken for one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from model.errors import CheckpointError, ConfigError
from model.layers import Block
from ops.reference_fp8 import ceil_div

Format = Literal["bsgemm", "mxfp8"]
FORMATS: tuple[Format, ...] = ("bsgemm", "mxfp8")
CONFIG_FIELD = "plosive_quantization"
METADATA_KEY = "plosive.quantization"
LAYOUT = 1  # of tensors, names and scales; a file with another is refused

_WEIGHT_BLOCK: Mapping[str, tuple[int, int]] = {"bsgemm": (128, 128), "mxfp8": (1, 32)}
_SCALE_DTYPE = {"bsgemm": torch.float32, "mxfp8": torch.uint8}


@dataclass(frozen=True, slots=True)
class Quantization:
    """The description."""

    format: Format
    source: str  # fingerprint of the weights that were quantised
    layout: int = LAYOUT
    weight_block: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        for name, got, valid in (
            ("format", self.format, list(FORMATS)),
            ("layout", self.layout, [LAYOUT]),
            ("weight_block", self.weight_block, [_WEIGHT_BLOCK.get(str(self.format))]),
        ):
            if got not in valid:
                expected = " or ".join(map(repr, valid))
                raise ConfigError(
                    f"{CONFIG_FIELD}.{name}: got {got!r}, expected {expected}; make the checkpoint "
                    "again with this version's `plosive quantize`"
                )

    @classmethod
    def of(cls, format: Format, source: str) -> Quantization:
        """The description of what this version writes."""
        return cls(format, source, weight_block=_WEIGHT_BLOCK[format])

    def as_json(self) -> dict[str, Any]:
        """For config.json and, as a string, for weight files."""
        return asdict(self) | {"weight_block": list(self.weight_block)}

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Of a matrix [rows, columns]."""
        block_rows, block_columns = self.weight_block
        return ceil_div(rows, block_rows), ceil_div(columns, block_columns)

    @property
    def scale_dtype(self) -> torch.dtype:
        """Of the scales."""
        return _SCALE_DTYPE[self.format]


class Matrix(NamedTuple):
    """A quantised matrix of a block."""

    attribute: str  # of the block
    name: str  # in the checkpoint, without the block's prefix; its scale is NAME_scale
    sources: tuple[str, ...]  # the matrices of an unquantised checkpoint that it is, row after row


_MATRICES = (
    Matrix("wqkv", "attention.wqkv.weight", ("attention.wqkv.weight",)),
    Matrix("wo", "attention.wo.weight", ("attention.wo.weight",)),
    Matrix(
        "gate_up",
        "feed_forward.w13.weight",
        ("feed_forward.w1.weight", "feed_forward.w3.weight"),
    ),
    Matrix("down", "feed_forward.w2.weight", ("feed_forward.w2.weight",)),
)
SPLIT_WQKV = ("attention.wq.weight", "attention.wk.weight", "attention.wv.weight")  # older ones


def matrix_shapes(block: Block) -> Iterator[tuple[Matrix, tuple[int, int]]]:
    """The matrices of a block and their shapes [out, in]."""
    for matrix in _MATRICES:
        rows, columns = getattr(block, matrix.attribute).shape
        yield matrix, (rows, columns)


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """The description in a config.json; None: the checkpoint is not quantised.

    Raises:
        ConfigError: naming what is not as this version writes it.
    """
    section = config.get(CONFIG_FIELD)
    if section is None:
        return None
    valid = {field.name for field in fields(Quantization)}
    if not isinstance(section, dict) or set(section) != valid:
        got = sorted(section) if isinstance(section, dict) else section
        raise ConfigError(
            f"{CONFIG_FIELD}: got {got!r}, expected the fields {sorted(valid)}; make the checkpoint "
            "again with this version's `plosive quantize`"
        )
    block = section["weight_block"]
    return Quantization(
        **section | {"weight_block": tuple(block) if isinstance(block, list) else block}
    )


def check_metadata(
    file: Path, metadata: Mapping[str, str] | None, quantization: Quantization | None
) -> None:
    """Refuse weights that are not the ones that config.json describes.

    Raises:
        CheckpointError: saying what both say.
    """
    found = (metadata or {}).get(METADATA_KEY)
    expected = None if quantization is None else quantization.as_json()
    try:
        stored = None if found is None else json.loads(found)
    except ValueError:
        stored = found
    if stored != expected:
        raise CheckpointError(
            f"{file}: its {METADATA_KEY} is {stored}, config.json's {CONFIG_FIELD} is {expected}; "
            "both must come from the same `plosive quantize`"
        )
