"""Times of attention, RoPE append, samplers, embedding at the shapes of S2 Pro, on one CUDA device.

    python -m bench_ttfa.kernels_attention [--kv bf16|fp8] [--json FILE]

With `--kv fp8` only what reads or writes keys and values is measured. Measured as in
`bench_ttfa.kernels`: the median of replays of a graph of many calls, keys and values cold (rotating
copies of a layer's pages beyond twice the L2), activations warm. GB/s counts the keys and values read,
once. Calls follow each other at once, so the start of one overlaps the end of the one before, as in a
frame. "left to wo": what a frame launches of a row or two, whose results wo merges; the fast AR's
attention of so few rows is in wo altogether (`bench_ttfa.kernels`, layers).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench_ttfa.command import file_to_write
from bench_ttfa.gpu_timing import Call, Timing, graph_us, need_cuda, num_copies, rotated
from bench_ttfa.system import describe_machine, describe_software
from model.kv_cache import KvFormat
from ops import attention, reference, sampling
from ops.attention_launch import Scratch
from ops.attention_plans import most_parts_of
from ops.attention_shared import shared_attention
from ops.embedding import embed_rows
from ops.fp8_rows import Fp8Rows, KvRows
from ops.packing import PackedWeight, pack_fp8
from ops.quantize import quantize_weight
from ops.sampling import Carried, Draws, Head

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE, DIM = 32, 8, 128, 32, 2560
NUM_CODEBOOKS, NUM_SEMANTIC, CODEBOOK_SIZE, WINDOW = 10, 4096, 4096, 10
MAX_LEN = 8192
EPS = 1e-6
# Rows x positions that each has read.
CONTEXTS = ((1, 512), (1, 2048), (4, 600), (16, 600), (32, 600), (64, 600), (128, 600))
SPANS = ((16, 600), (64, 600), (128, 600), (128, 2000))  # rows x positions
ROWS = (1, 16, 64, 128)


class Layers:
    """Copies of one layer's pages, and rows over them."""

    def __init__(self, lengths: Sequence[int], kv_format: KvFormat = "bf16") -> None:
        needed = [-(-length // PAGE) for length in lengths]
        num_pages = sum(needed) + 1
        row_bytes = HEAD_DIM + 2 if kv_format == "fp8" else 2 * HEAD_DIM
        self.read_bytes = sum(lengths) * 2 * NUM_KV_HEADS * row_bytes
        shape = (num_pages, 2, NUM_KV_HEADS, PAGE, HEAD_DIM)
        self.pages: list[KvRows] = [
            Fp8Rows.of(normal(*shape)) if kv_format == "fp8" else normal(*shape)
            for _ in range(num_copies(self.read_bytes))
        ]
        self.page_table = torch.zeros(
            len(lengths) + 1, MAX_LEN // PAGE, dtype=torch.int32, device="cuda"
        )
        order = torch.randperm(num_pages - 1, device="cuda").int() + 1
        begin = 0
        for slot, used in enumerate(needed):
            self.page_table[slot, :used] = order[begin : begin + used]
            begin += used
        self.slots = torch.arange(len(lengths), device="cuda")
        self.positions = torch.tensor(lengths, device="cuda") - 1
        self.rope = reference.rope_table(MAX_LEN, HEAD_DIM, 1e6, torch.device("cuda"))
        self.qk_norm = normal(NUM_HEADS + NUM_KV_HEADS, HEAD_DIM)
        self.qkv = normal(len(lengths), NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
        parts = most_parts_of(MAX_LEN // 16)
        group, device = NUM_HEADS // NUM_KV_HEADS, self.qkv.device
        self.scratch = Scratch(NUM_KV_HEADS, group, HEAD_DIM, parts, device)

    def where(self, copy: int) -> tuple[KvRows, Tensor, Tensor, Tensor]:
        return self.pages[copy], self.page_table, self.slots, self.positions

    def append_us(self) -> float:
        def make(copy: int) -> Call:
            rotary = (self.qk_norm, EPS, self.rope)
            pages, *where = self.where(copy)
            return lambda: attention.rope_append(self.qkv, *rotary, pages, *where)

        return graph_us(rotated(make, len(self.pages)))

    def decode_us(self, wo: PackedWeight | None = None) -> float:
        """`decode_attention`: norm, rotation and append included. With `wo` it may leave the end to
        that."""
        norm, rope = self.qk_norm, self.rope

        def make(copy: int) -> Call:
            where = self.where(copy)
            return lambda: attention.decode_attention(
                *(self.qkv, norm, EPS, rope, *where, "bsfp8"),
                is_chained=True,
                scratch=self.scratch,
                wo=wo,
            )

        return graph_us(rotated(make, len(self.pages)))

    def span_us(self, num_rows: int) -> float:
        """`shared_attention` of the last rows of the first slot."""
        q = normal(num_rows, NUM_HEADS, HEAD_DIM)
        last = int(self.positions[0])
        positions = torch.arange(last + 1 - num_rows, last + 1, device="cuda")
        slots = self.slots[:1].expand(num_rows).contiguous()

        def make(copy: int) -> Call:
            where = (self.pages[copy], self.page_table, slots, positions)
            return lambda: shared_attention(q, *where, "bsfp8")

        return graph_us(rotated(make, len(self.pages)))


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def torch_attention_us(num_rows: int, length: int) -> float:
    """torch's attention over contiguous memory of equal lengths, queries rotated already."""
    num_bytes = num_rows * length * 4 * NUM_KV_HEADS * HEAD_DIM
    copies = num_copies(num_bytes)
    kv = [normal(2, num_rows, NUM_KV_HEADS, length, HEAD_DIM) for _ in range(copies)]
    q = normal(num_rows, NUM_HEADS, 1, HEAD_DIM)

    def make(copy: int) -> Call:
        k, v = kv[copy]
        return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return graph_us(rotated(make, copies))


def attention_timings(kv_format: KvFormat) -> Iterable[Timing]:
    for num_rows, length in CONTEXTS:
        layers = Layers([length] * num_rows, kv_format)
        variants = {
            "decode_attention": layers.decode_us(),
            "rope_append": layers.append_us(),
        }
        if num_rows == 1:
            wo = pack_fp8(*quantize_weight(normal(DIM, NUM_HEADS * HEAD_DIM)))
            variants["decode, left to wo"] = layers.decode_us(wo)
        if kv_format == "bf16":
            variants["torch sdpa, contiguous"] = torch_attention_us(num_rows, length)
        for variant, us in variants.items():
            label = f"attention, {kv_format}, {length} positions"
            yield Timing(label, variant, num_rows, us, layers.read_bytes / us / 1000)
    yield mixed_timing(kv_format)
    yield from span_timings(kv_format)


def span_timings(kv_format: KvFormat) -> Iterable[Timing]:
    """The last rows of one slot's prompt, as a prefill chunk reads them."""
    for num_rows, length in SPANS:
        layers = Layers([length], kv_format)
        us = layers.span_us(num_rows)
        label = f"span of a prompt, {kv_format}, {length} positions"
        yield Timing(label, "shared_attention", num_rows, us, layers.read_bytes / us / 1000)


def mixed_timing(kv_format: KvFormat) -> Timing:
    """64 rows of 32 to 4096 positions, as many of each magnitude, in any order."""
    lengths = [int(2 ** (5 + 7 * i / 63)) for i in range(64)]
    random.Random(1).shuffle(lengths)
    layers = Layers(lengths, kv_format)
    us = layers.decode_us()
    label = f"attention, {kv_format}, 32..4096 positions, {sum(lengths)} in all"
    return Timing(label, "decode_attention", 64, us, layers.read_bytes / us / 1000)


def frame_us(num_rows: int, start: int, num_positions: int) -> float:
    shape = (2, num_rows, NUM_KV_HEADS, NUM_CODEBOOKS, HEAD_DIM)
    memories = [normal(*shape) for _ in range(4)]
    rope = reference.rope_table(NUM_CODEBOOKS, HEAD_DIM, 1e6, torch.device("cuda"))
    qkv = normal(num_rows * num_positions, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)

    def make(copy: int) -> Call:
        args = (qkv, None, EPS, rope, memories[copy], start, num_positions)
        return lambda: attention.frame_attention(*args, "bsfp8", is_chained=True)

    return graph_us(rotated(make, len(memories)))


class Sampler:
    """Everything that the samplers of a batch read and write."""

    def __init__(self, num_rows: int) -> None:
        def filled(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((num_rows,), value, device="cuda", dtype=dtype)

        self.slots = torch.arange(num_rows, device="cuda")
        seeds = torch.randint(0, 1 << 60, (num_rows,), device="cuda")
        frame_idx = filled(3, torch.int32)
        parameters = (filled(0.8), filled(0.8), filled(30, torch.int32), seeds, frame_idx)
        self.draws = Draws(self.slots, *parameters, is_chained=True)
        self.window = torch.zeros(num_rows, WINDOW, 1, device="cuda", dtype=torch.int32)
        tokens = torch.arange(1000, 1001 + NUM_SEMANTIC, device="cuda", dtype=torch.int32)
        self.head = Head(tokens, torch.arange(NUM_SEMANTIC + 1, device="cuda").clamp(max=4095))
        self.hidden, self.table = normal(num_rows, DIM), normal(CODEBOOK_SIZE, DIM)
        self.codes = torch.zeros(num_rows, NUM_CODEBOOKS, device="cuda", dtype=torch.int32)
        self.semantic_logits = 3 * normal(num_rows, NUM_SEMANTIC + 1)
        self.logits = 3 * normal(num_rows, CODEBOOK_SIZE)
        rows = torch.zeros(num_rows, 1 + NUM_CODEBOOKS, device="cuda", dtype=torch.int32)
        rows[:, 0] = 1500
        position = torch.zeros(num_rows, device="cuda", dtype=torch.int64)
        self.carried = Carried(rows, position, self.window, frame_idx)
        self.embeddings, self.codebooks = normal(8192, DIM), normal(NUM_CODEBOOKS * 4096, DIM)

    def semantic(self) -> object:
        return sampling.draw_semantic(
            *(self.semantic_logits, self.window, self.draws, self.head),
            *(self.hidden, self.table, self.codes),
        )

    def codebook(self) -> object:
        return sampling.draw_codebook(self.logits, 4, self.draws, self.table, self.codes)

    def advance(self) -> object:
        sampling.advance(self.carried, self.slots, self.slots, self.codes, self.head.tokens)
        return None

    def embed(self) -> object:
        tables = (self.embeddings, self.codebooks, (1000, 5096))
        return embed_rows(self.carried.rows, self.slots, *tables)

    def in_torch(self) -> object:
        sampler = sampling.FrameSampler(self.draws, 2, self.logits.shape[1])
        return sampler.codebook(self.logits.float(), 1)


def small_timings() -> Iterable[Timing]:
    for num_rows in ROWS:
        yield Timing("fast AR attention", "1 position", num_rows, frame_us(num_rows, 6, 1), 0)
        yield Timing("fast AR attention", "2 positions", num_rows, frame_us(num_rows, 0, 2), 0)
        sampler = Sampler(num_rows)
        for name, call in (
            ("draw_semantic", sampler.semantic),
            ("draw_codebook", sampler.codebook),
            ("codebook in torch", sampler.in_torch),
            ("advance", sampler.advance),
            ("embed_rows", sampler.embed),
        ):
            yield Timing("sampling", name, num_rows, graph_us([call] * 24), 0)


def measure(kv_format: KvFormat) -> Iterable[Timing]:
    """All timings, in the order of the table."""
    yield from attention_timings(kv_format)
    if kv_format == "bf16":
        yield from small_timings()


def line(timing: Timing) -> str:
    rate = f"{timing.gb_per_s:6.0f}" if timing.gb_per_s else ""
    return f"{timing.op:46} {timing.variant:23} {timing.rows:4} {timing.us:8.2f} {rate}".rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench_ttfa.kernels_attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kv", choices=["bf16", "fp8"], default="bf16", help="keys and values")
    parser.add_argument("--json", type=file_to_write, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    need_cuda(parser)
    print(f"{'op':46} {'variant':23} rows       us   GB/s")
    timings = []
    for timing in measure(options.kv):
        timings.append(timing)
        print(line(timing), flush=True)
    if options.json:
        name = torch.cuda.get_device_name()
        record: dict[str, Any] = {
            "machine": describe_machine(),
            "software": describe_software(),
            "device": name,
            "torch": torch.__version__,
        }
        record["timings"] = [asdict(timing) for timing in timings]
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
