"""A random model as files: the published names, layout and sizes, for every path that reads files."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from model.checkpoint_files import published_name
from model.codec.dac import DacCodec
from model.config import DualARConfig
from model.dual_ar import DualAR
from model.geometries import config_json
from model.loader import placements
from model.parallel import map_in_order, num_places
from model.random_model import RandomModel, codec_config
from model.random_weights import RandomWeights, bf16_row_slices, draw_codec_weight, draw_rows
from model.tensor_files import PIECE_BYTES, Entry, write_weights


class CheckpointPlan(NamedTuple):
    """What `write_checkpoint` is going to write."""

    config: DualARConfig
    names: dict[str, str]  # name in the file -> name in `model.loader`
    weights: list[Entry]
    codec: dict[str, tuple[int, ...]]  # name in `model.codec` -> shape, f32

    @property
    def codec_nbytes(self) -> int:
        """Of the codec."""
        return 4 * sum(math.prod(shape) for shape in self.codec.values())

    @property
    def nbytes(self) -> int:
        """Of weights and codec."""
        return sum(entry.nbytes for entry in self.weights) + self.codec_nbytes

    @property
    def disk_nbytes(self) -> int:
        """That are needed while it is written, see `_write_codec`."""
        return self.nbytes + self.codec_nbytes


def plan_checkpoint(geometry: str) -> CheckpointPlan:
    """Names and shapes of a geometry's checkpoint, as published; bf16, the codec f32."""
    meta = torch.device("meta")
    data = config_json(geometry)
    config = DualARConfig.from_dict(data)
    names: dict[str, str] = {}
    weights: list[Entry] = []
    for placement in placements(DualAR(config, meta, torch.bfloat16)):
        name = published_name(placement.name, data["model_type"])
        names[name] = placement.name
        weights.append(Entry(name, torch.bfloat16, placement.shape))
    recorder = _ShapeRecorder(meta)
    DacCodec(codec_config(geometry), recorder)
    return CheckpointPlan(config, names, weights, recorder.shapes)


def write_checkpoint(
    made_up: RandomModel, folder: Path, on_bytes: Callable[[int], object] = lambda _: None
) -> None:
    """The same model as files, in the published names and layout; values are drawn on the CPU.

    Holds no more than a piece of a tensor for each core.

    Args:
        folder: exists and is empty.
        on_bytes: told how many bytes were written since the last call; `plan.nbytes` in all.
    """
    plan = plan_checkpoint(made_up.geometry)
    made_up.write_small_files(folder)
    tasks = [(entry, rows) for entry in plan.weights for rows in bf16_row_slices(entry.shape)]
    memory = [torch.empty(PIECE_BYTES // 2, dtype=torch.bfloat16) for _ in range(num_places())]

    def draw(task: tuple[Entry, slice], place: int) -> Tensor:
        entry, rows = task
        shape = (rows.stop - rows.start, *entry.shape[1:])
        out = memory[place][: math.prod(shape)].view(shape)
        draw_rows(plan.names[entry.name], entry.shape, rows, plan.config, made_up.seed, out)
        return out

    with closing(map_in_order(draw, tasks)) as drawn:

        def pieces(entry: Entry) -> Iterator[Tensor]:
            return islice(drawn, sum(1 for _ in bf16_row_slices(entry.shape)))

        write_weights(folder, plan.weights, pieces, {}, on_bytes)
    _write_codec(plan, made_up.seed, folder, on_bytes)


def _write_codec(
    plan: CheckpointPlan, seed: int, folder: Path, on_bytes: Callable[[int], object]
) -> None:
    """torch writes a whole dictionary at once, so that its tensors lie in files until then."""
    codec: dict[str, Tensor] = {}
    scratch = folder / "scratch"
    scratch.mkdir()

    for name, shape in plan.codec.items():
        file, size = str(scratch / name), math.prod(shape)
        with Path(file).open("xb") as stream:  # a mapped page that finds the disk full is a SIGBUS
            os.posix_fallocate(stream.fileno(), 0, 4 * size)
        weight = torch.from_file(file, shared=True, size=size, dtype=torch.float32).view(shape)
        draw_codec_weight(name, seed, weight)
        codec |= _published_codec_weight(name, weight)
        on_bytes(weight.nbytes)
    try:
        torch.save(codec, folder / "codec.pth")
    except RuntimeError as error:  # torch's word for what the system refused
        raise OSError(errno.ENOSPC, f"cannot be written ({error})", "codec.pth") from error
    shutil.rmtree(scratch)


class _ShapeRecorder(RandomWeights):
    """Says what the codec asks for."""

    def __init__(self, meta: torch.device) -> None:
        super().__init__(0, meta, torch.float32)
        self.shapes: dict[str, tuple[int, ...]] = {}  # shared by all that `at` makes

    def take(self, name: str, *shape: int) -> Tensor:
        self.shapes[self._prefix + name] = shape
        return torch.empty(shape, device=self.device)


def _published_codec_weight(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Under the names that training left: weight norm in two spellings, or none."""
    is_conv = name.startswith(("encoder.", "decoder.")) and name.endswith("conv.weight")
    if not is_conv and not name.endswith(("in_proj.weight", "out_proj.weight")):
        return {name: weight}
    gain = torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.dim())), keepdim=True)
    stem = name.removesuffix("weight")
    norm = "parametrizations.weight.original" if is_conv else "weight_"
    first, second = ("0", "1") if is_conv else ("g", "v")
    return {f"{stem}{norm}{first}": gain, f"{stem}{norm}{second}": weight}
