"""Times of the linear layers and of the MLP block at decode shapes, on one CUDA device.

    python -m bench_ttfa.kernels [--rows 1,16,64,128] [--json FILE] [--no-compile]

Every figure is the median of replays of one CUDA graph that runs the op many times over rotating
copies of its weights, together at least twice the L2: weights are cold, as they are in a model;
activations are warm. GB/s counts the weights and their scales, once; of a layer, with 512 positions
per row, also the keys and values. Comparators run in the same process on weights of the same shapes:
torch's bf16, its block-scaled `scaled_mm` of the linears, `torch.compile` of the MLP block.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench_ttfa.command import file_to_write, positive_ints, some_of
from bench_ttfa.gpu_timing import (
    Call,
    Timing,
    copy_bandwidth,
    graph_us,
    need_cuda,
    num_copies,
    rotated,
)
from bench_ttfa.system import describe_machine, describe_software
from model.wide_rows import MOST_NARROW_ROWS
from ops import reference
from ops.linear import PackedWeight, gate_up_swiglu, linear, pack_bf16, pack_fp8
from ops.quantize import Kind, quantize_rows, quantize_weight
from ops.reference_fp8 import ceil_div

LINEARS = {
    "wqkv": (6144, 2560),
    "wo": (2560, 4096),
    "gate_up": (19456, 2560),
    "down": (2560, 9728),
}
MLP = "mlp block"
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192)


def random_matrix(num_rows: int, num_columns: int) -> Tensor:
    weight: Tensor = torch.randn(num_rows, num_columns, device="cuda") / num_columns**0.5
    return weight.bfloat16()


def pack(weight: Tensor, kind: Kind, *, is_gate_up: bool = False) -> PackedWeight:
    if kind == "bf16":
        return pack_bf16(weight, is_gate_up=is_gate_up)
    return pack_fp8(*quantize_weight(weight), is_gate_up=is_gate_up)


def weight_bytes(shapes: Sequence[tuple[int, int]], kind: Kind) -> int:
    values = sum(n * k for n, k in shapes)
    return values * 2 if kind == "bf16" else values + values // 128**2 * 4


def narrow(rows: Sequence[int], kind: Kind) -> list[int]:
    """Those that a model runs through these kernels; more are the vendor's (`model.wide_rows`)."""
    return [num_rows for num_rows in rows if num_rows <= MOST_NARROW_ROWS[kind]]


def shapes_of(op: str) -> list[tuple[int, int]]:
    return [LINEARS["gate_up"], LINEARS["down"]] if op == MLP else [LINEARS[op]]


def our_calls(op: str, kind: Kind, copies: int) -> Callable[[int], list[Call]]:
    """A function from the number of rows to the calls; the packed weights are made once."""
    packed = []
    for _ in range(copies):
        weights = [random_matrix(n, k) for n, k in shapes_of(op)]
        packed.append(
            [
                pack(w, kind, is_gate_up=op in (MLP, "gate_up") and i == 0)
                for i, w in enumerate(weights)
            ]
        )

    def calls(num_rows: int) -> list[Call]:
        x = torch.randn(num_rows, shapes_of(op)[0][1], device="cuda").bfloat16()
        scaled = x if kind == "bf16" else quantize_rows(x)

        def make(i: int) -> Call:
            first, last = packed[i][0], packed[i][-1]
            if op == "gate_up":
                return lambda: gate_up_swiglu(scaled, first)
            if op != MLP:
                return lambda: linear(scaled, first)
            if kind == "bf16":
                return lambda: linear(gate_up_swiglu(x, first), last)
            return lambda: linear(gate_up_swiglu(quantize_rows(x), first), last)

        return rotated(make, copies)

    return calls


def _torch_op(op: str) -> Callable[[Tensor, list[Tensor]], Tensor]:
    def one(x: Tensor, weights: list[Tensor]) -> Tensor:
        return F.linear(x, weights[0])

    def gate_up(x: Tensor, weights: list[Tensor]) -> Tensor:
        return reference.swiglu(F.linear(x, weights[0]))

    def mlp(x: Tensor, weights: list[Tensor]) -> Tensor:
        return F.linear(gate_up(x, weights), weights[1])

    return {MLP: mlp, "gate_up": gate_up}.get(op, one)


def torch_calls(op: str, copies: int, *, is_compiled: bool) -> Callable[[int], list[Call]]:
    weights = [[random_matrix(n, k) for n, k in shapes_of(op)] for _ in range(copies)]
    run: Callable[..., Any] = _torch_op(op)
    if is_compiled:
        run = torch.compile(run, dynamic=False)

    def calls(num_rows: int) -> list[Call]:
        x = torch.randn(num_rows, shapes_of(op)[0][1], device="cuda").bfloat16()
        return rotated(lambda i: lambda: run(x, weights[i]), copies)

    return calls


def scaled_mm_calls(op: str, copies: int) -> Callable[[int], list[Call]]:
    """torch's block-scaled product on rows that are quantised already (its MLP is not compared).

    cuBLAS takes a multiple of four rows.
    """
    weights = [quantize_weight(random_matrix(*LINEARS[op])) for _ in range(copies)]
    block = F.ScalingType

    def calls(num_rows: int) -> list[Call]:
        padded = ceil_div(num_rows, 4) * 4
        x = quantize_rows(torch.randn(padded, LINEARS[op][1], device="cuda").bfloat16())

        def make(i: int) -> Call:
            data, weight_scale = weights[i]
            return lambda: F.scaled_mm(
                x.data,
                data.t(),
                x.scale.t(),
                block.BlockWise1x128,
                weight_scale.t(),
                block.BlockWise128x128,
                output_dtype=torch.bfloat16,
            )

        return rotated(make, copies)

    return calls


def measure(op: str, rows: Sequence[int], *, has_compile: bool) -> list[Timing]:
    """All variants of one op, at every number of rows; one that does not run is left out, with a
    line on stderr."""
    copies = {kind: num_copies(weight_bytes(shapes_of(op), kind)) for kind in ("bf16", "bsfp8")}
    variants: list[tuple[str, Kind, Callable[[], Callable[[int], list[Call]]]]] = [
        ("bsfp8", "bsfp8", lambda: our_calls(op, "bsfp8", copies["bsfp8"])),
        ("bf16", "bf16", lambda: our_calls(op, "bf16", copies["bf16"])),
        ("torch bf16", "bf16", lambda: torch_calls(op, copies["bf16"], is_compiled=False)),
    ]
    if op != MLP:
        variants.append(("scaled_mm", "bsfp8", lambda: scaled_mm_calls(op, copies["bsfp8"])))
    if has_compile and op == MLP:  # a linear alone is the same product
        variants.append(
            ("compile bf16", "bf16", lambda: torch_calls(op, copies["bf16"], is_compiled=True))
        )
    timings = []
    for name, kind, prepare in variants:
        num_bytes = weight_bytes(shapes_of(op), kind)
        try:
            calls = prepare()
            for num_rows in narrow(rows, kind) if name == kind else rows:
                us = graph_us(calls(num_rows))
                timings.append(Timing(op, name, num_rows, us, num_bytes / us / 1000))
        except (RuntimeError, AttributeError, TypeError, ValueError) as error:
            print(f"{op}: {name} does not run here: {str(error)[:200]}", file=sys.stderr)
        torch.cuda.empty_cache()
    return timings


def table(timings: Sequence[Timing], bandwidth: float) -> str:
    """One line per op and number of rows."""
    lines = [
        f"{'op':10} rows {'variant':13} {'us':>7} {'GB/s':>6} {'of copy':>7}  times as fast as"
    ]
    ordered = sorted(timings, key=lambda t: (t.op, t.rows))
    for (op, rows), group in itertools.groupby(ordered, key=lambda t: (t.op, t.rows)):
        cell = list(group)
        for timing in cell:
            others = [t for t in cell if t.variant.split(",")[0] not in ("bf16", "bsfp8")]
            ratios = ", ".join(f"{t.variant} {t.us / timing.us:.2f}" for t in others)
            is_ours = timing not in others
            lines.append(
                f"{op:10} {rows:4} {timing.variant:13} {timing.us:7.2f} {timing.gb_per_s:6.0f} "
                f"{timing.gb_per_s / bandwidth:7.0%}  {ratios if is_ours else ''}".rstrip()
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench_ttfa.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ops = (*LINEARS, MLP, "layer")
    parser.add_argument("--rows", type=positive_ints, default=ROWS, help="numbers of rows")
    parser.add_argument("--ops", type=some_of(ops), default=ops, help="which ops")
    parser.add_argument("--json", type=file_to_write, help="also write the figures to this file")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    options = parser.parse_args(arguments)
    need_cuda(parser)
    warnings.simplefilter("ignore")
    bandwidth = copy_bandwidth()
    name = torch.cuda.get_device_name()
    print(f"{name}: a copy moves {bandwidth:.0f} GB/s; torch {torch.__version__}")
    timings = []
    for op in options.ops:
        if op == "layer":
            layers = importlib.import_module(
                "bench_ttfa.kernels_layer"
            )  # which imports this module
            timings += layers.measure_layers(options.rows)
        else:
            timings += measure(op, options.rows, has_compile=not options.no_compile)
    print(table(timings, bandwidth))
    if options.json:
        record: dict[str, Any] = {
            "machine": describe_machine(),
            "software": describe_software(),
            "device": name,
            "torch": torch.__version__,
            "copy_gb_per_s": bandwidth,
        }
        record["timings"] = [asdict(timing) for timing in timings]
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
