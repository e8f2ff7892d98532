"""Blocks with random weights, packed for the kernel and plain for their definition in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import reference, reference_fp8
from ops.packing import PackedWeight, pack_bf16, pack_fp8
from ops.persistent import HeadTensors, LayerTensors, PersistentStack, StackTensors
from ops.persistent_plans import Geometry, Plan
from ops.quantize import Kind, quantize_weight

EPS = 1e-6
PAGE, HELD = 32, 10
NUM_LOGITS = 4097
NAMES = ("wqkv", "wo", "gate_up", "down")
S2_PRO = Geometry(2560, 9728, 32, 8, 128)
S1_MINI = Geometry(1024, 3072, 16, 8, 128)


@dataclass
class PlainLayer:
    matrices: dict[str, Tensor]  # what the packed ones stand for, fp32
    attention_norm: Tensor
    ffn_norm: Tensor
    qk_norm: Tensor
    memory: Tensor


class Case:
    """`num_layers` blocks, and paged memory of rows of `lengths` positions with their own included,
    or the fast AR's memory of `num_streams`."""

    def __init__(
        self,
        geometry: Geometry,
        kind: Kind,
        num_layers: int,
        *,
        lengths: list[int] | None = None,
        num_streams: int = 0,
        max_len: int = 1024,
        seed: int = 0,
    ) -> None:
        self.geometry, self.kind, self.is_fast = geometry, kind, lengths is None
        self.random = torch.Generator("cuda").manual_seed(seed)
        self.rope = reference.rope_table(max_len, geometry.head_dim, 1e6, torch.device("cuda"))
        lengths = lengths or []
        self.slots = torch.randperm(len(lengths), generator=self.random, device="cuda")
        self.positions = torch.tensor(lengths, dtype=torch.int64, device="cuda") - 1
        num_pages = [-(-length // PAGE) for length in lengths]
        self.page_table = torch.zeros(
            len(lengths) + 1, max_len // PAGE, dtype=torch.int32, device="cuda"
        )
        order = torch.randperm(sum(num_pages), generator=self.random, device="cuda").int() + 1
        for slot, pages in zip(self.slots.tolist(), torch.split(order, num_pages), strict=False):
            self.page_table[slot, : len(pages)] = pages
        heads = geometry.num_kv_heads, geometry.head_dim
        if self.is_fast:
            shape: tuple[int, ...] = (2, num_streams, heads[0], HELD, heads[1])
        else:
            shape = (sum(num_pages) + 1, 2, heads[0], PAGE, heads[1])
        self.head_weight = self.normal(NUM_LOGITS, geometry.dim, scale=geometry.dim**-0.5)
        self.head = HeadTensors(
            1 + self.normal(geometry.dim, scale=0.1), pack_bf16(self.head_weight)
        )
        self.layers: list[LayerTensors] = []
        self.plain: list[PlainLayer] = []
        for _ in range(num_layers):
            self._add_layer(shape)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.random, device="cuda") * scale).bfloat16()

    def _add_layer(self, memory_shape: tuple[int, ...]) -> None:
        packed: list[PackedWeight] = []
        plain: dict[str, Tensor] = {}
        for name, (n, k) in zip(NAMES, self.geometry.matrices, strict=True):
            weight = self.normal(n, k, scale=k**-0.5)
            is_gate_up = name == "gate_up"
            if self.kind == "bf16":
                packed.append(pack_bf16(weight, is_gate_up=is_gate_up))
                plain[name] = weight.float()
            else:
                data, scale = quantize_weight(weight)
                packed.append(pack_fp8(data, scale, is_gate_up=is_gate_up))
                plain[name] = reference_fp8.dequantize_weight(data, scale)
        geometry = self.geometry
        heads = geometry.num_heads + geometry.num_kv_heads
        norms = (
            1 + self.normal(geometry.dim, scale=0.1),
            1 + self.normal(geometry.dim, scale=0.1),
            1 + self.normal(heads, geometry.head_dim, scale=0.1),
        )
        wqkv, wo, gate_up, down = packed
        memory = self.normal(*memory_shape)
        self.layers.append(LayerTensors(wqkv, wo, gate_up, down, *norms, memory))
        self.plain.append(PlainLayer(plain, *norms, memory.clone()))

    def stack(self, plan: Plan, **options: object) -> PersistentStack:
        tensors = StackTensors(self.layers, self.head, self.rope, EPS, self.is_fast)
        return PersistentStack(tensors, self.geometry, self.kind, plan, **options)  # type: ignore[arg-type]

    def rows(self, num_rows: int) -> Tensor:
        return self.normal(num_rows, self.geometry.dim)

    def define(self, x: Tensor, start: int = 0, num_positions: int = 1) -> dict[str, Tensor]:
        """What norm and head make of rows x after all blocks, and what the last block makes on the
        way. Writes `plain[...].memory`."""
        steps: dict[str, Tensor] = {}
        for layer in self.plain:
            steps = {"qkv": self.qkv_of(x, layer)}
            steps["attended"] = self.attended_of(steps["qkv"], layer, start, num_positions)
            steps["middle"] = x + self._product(steps["attended"], layer, "wo")
            steps["hidden"] = self.hidden_of(steps["middle"], layer)
            x = steps["last"] = self.last_of(steps["middle"], steps["hidden"], layer)
        return {**steps, **self.logits_of(x, num_positions)}

    def step_by_step(
        self, x: Tensor, made: dict[str, Tensor], start: int = 0, num_positions: int = 1
    ) -> dict[str, Tensor]:
        """`define` for one block, every step from what the kernel made in the step before."""
        (layer,) = self.plain
        return {
            "qkv": self.qkv_of(x, layer),
            "attended": self.attended_of(made["qkv"], layer, start, num_positions),
            "middle": x + self._product(made["attended"], layer, "wo"),
            "hidden": self.hidden_of(made["middle"], layer),
            "last": self.last_of(made["middle"], made["hidden"], layer),
            **self.logits_of(made["last"], num_positions),
        }

    def qkv_of(self, x: Tensor, layer: PlainLayer) -> Tensor:
        return self._product(reference.rms_norm(x, layer.attention_norm, EPS), layer, "wqkv")

    def attended_of(self, qkv: Tensor, layer: PlainLayer, start: int, num_positions: int) -> Tensor:
        rows = [self._attend(qkv, row, layer, start, num_positions) for row in range(len(qkv))]
        return torch.stack(rows)

    def hidden_of(self, middle: Tensor, layer: PlainLayer) -> Tensor:
        normed = reference.rms_norm(middle, layer.ffn_norm, EPS)
        return reference.swiglu(self._product(normed, layer, "gate_up"))

    def last_of(self, middle: Tensor, hidden: Tensor, layer: PlainLayer) -> Tensor:
        return middle + self._product(hidden, layer, "down")

    def logits_of(self, x: Tensor, num_positions: int) -> dict[str, Tensor]:
        normed = reference.rms_norm(x, self.head.norm, EPS)
        last = normed[num_positions - 1 :: num_positions].float()
        return {"normed": normed, "logits": F.linear(last, self.head_weight.float()).bfloat16()}

    def _product(self, x: Tensor, layer: PlainLayer, name: str) -> Tensor:
        exact = x.float()
        if self.kind == "bsfp8":
            exact = reference_fp8.dequantize_rows(*reference_fp8.quantize_rows(x))
        return F.linear(exact, layer.matrices[name]).bfloat16()

    def _attend(
        self, qkv: Tensor, row: int, layer: PlainLayer, start: int, num_positions: int
    ) -> Tensor:
        """[H * D]; writes the row's key and value first. Rows of a stream come in order."""
        geometry = self.geometry
        if self.is_fast:
            position = start + row % num_positions
            held = layer.memory[:, row // num_positions]  # [2, H_kv, HELD, D]
        else:
            position, slot = int(self.positions[row]), int(self.slots[row])
            used = self.page_table[slot, : position // PAGE + 1].long()
            held = layer.memory[used].permute(1, 2, 0, 3, 4).flatten(2, 3)
        heads = qkv[row].view(-1, geometry.head_dim)
        rotated = heads[: -geometry.num_kv_heads].clone()[None]
        source = reference.rms_norm(rotated, layer.qk_norm, EPS)
        reference.rope(source, self.rope[position : position + 1], out=rotated)
        held[0, :, position] = rotated[0, geometry.num_heads :]
        held[1, :, position] = heads[-geometry.num_kv_heads :]
        if not self.is_fast:
            page = int(self.page_table[slot, position // PAGE])
            layer.memory[page, :, :, position % PAGE] = held[:, :, position]
        group = geometry.num_heads // geometry.num_kv_heads
        keys, values = held[:, :, : position + 1].float().repeat_interleave(group, 1)
        queries = rotated[0, : geometry.num_heads].float()
        scores = torch.einsum("hd,hpd->hp", queries, keys) * geometry.head_dim**-0.5
        return torch.einsum("hp,hpd->hd", scores.softmax(-1), values).flatten().bfloat16()


def values(words: Tensor) -> Tensor:
    """bf16 of words that a launch leaves."""
    return words.view(torch.int32)[:, ::2].contiguous().view(torch.bfloat16)


def relative_error(out: Tensor, expected: Tensor) -> float:
    difference = (out.float() - expected.float()).norm() / expected.float().norm()
    return float(difference.nan_to_num(torch.inf))
