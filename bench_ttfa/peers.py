"""The MLP block of S2 Pro beside its peers, in one run on one CUDA device.

    python -m bench_ttfa.peers [--rows 1,16,64,128] [--json FILE]

The block is bf16 rows to bf16 rows: gate and up (19456x2560), SwiGLU, down (2560x9728). All peers have
the same weights, cold as in `bench_ttfa.kernels`, and each result is compared with the exact product
before it is timed. Peers with 8 bits have block scales, as ours; what they lack of the block is ours
(quantising rows) or made by torch.compile (SwiGLU, with quantisation where the peer takes rows in 8
bits), one launch each. DeepGEMM and FlashInfer are measured where they are installed (`pip install
sgl-deep-gemm`, `flashinfer-python`); a peer that cannot be had is a row that says why.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench_ttfa.command import file_to_write, positive_ints, some_of
from bench_ttfa.gpu_timing import Timing, copy_bandwidth, graph_us, need_cuda, num_copies, rotated
from bench_ttfa.kernels import MLP, pack, random_matrix, shapes_of, table, weight_bytes
from bench_ttfa.system import describe_machine, describe_software
from ops import reference, reference_fp8
from ops.linear import gate_up_swiglu, linear
from ops.quantize import BlockScaled, Kind, quantize_rows, quantize_weight
from ops.reference_fp8 import ceil_div

ROWS = (1, 16, 64, 128)
MAX_ERROR: dict[Kind, float] = {"bf16": 0.01, "bsfp8": 0.08}  # relative; of the format, with room

Block = Callable[[Tensor], Tensor]  # bf16 [M, C] -> bf16 [M, C]
Product = Callable[[BlockScaled, Tensor, Tensor], Tensor]  # rows, e4m3 [N, K], scale -> bf16 [M, N]


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one MLP: bf16 [2F, C] and [C, F]."""

    gate_up: Tensor
    down: Tensor

    @classmethod
    def random(cls) -> Weights:
        return cls(*(random_matrix(n, k) for n, k in shapes_of(MLP)))

    def exact(self, x: Tensor) -> Tensor:
        """fp32, nothing rounded between."""
        hidden = reference.swiglu(x.float() @ self.gate_up.float().t())
        return hidden @ self.down.float().t()


@dataclass(frozen=True, slots=True)
class Peer:
    """Somebody's MLP block.

    Attributes:
        make: the block over weights; raises what says why it cannot be had.
        row_multiple: of the rows that it takes; others are padded.
    """

    name: str
    kind: Kind
    make: Callable[[Weights], Block]
    row_multiple: int = 1


def _ours(kind: Kind, weights: Weights) -> Block:
    gate_up = pack(weights.gate_up, kind, is_gate_up=True)
    down = pack(weights.down, kind)
    if kind == "bf16":
        return lambda x: linear(gate_up_swiglu(x, gate_up), down)
    return lambda x: linear(gate_up_swiglu(quantize_rows(x), gate_up), down)


def _mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return F.linear(reference.swiglu(F.linear(x, gate_up)), down)


@functools.cache
def _compiled(function: Callable[..., Any], mode: str | None = None) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, mode=mode, dynamic=False)
    return compiled


def _torch(weights: Weights) -> Block:
    return lambda x: _mlp(x, weights.gate_up, weights.down)


def _torch_compile(weights: Weights) -> Block:
    run = _compiled(_mlp, "max-autotune-no-cudagraphs")  # the graph is the bench's
    return lambda x: run(x, weights.gate_up, weights.down)


def _swiglu_quantised(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    return reference_fp8.quantize_rows(reference.swiglu(gate_up))


def _block_scaled(product: Product, weights: Weights) -> Block:
    """Of two products in 8 bits."""
    gate_up, down = quantize_weight(weights.gate_up), quantize_weight(weights.down)
    between = _compiled(_swiglu_quantised)

    def run(x: Tensor) -> Tensor:
        hidden = BlockScaled(*between(product(quantize_rows(x), *gate_up)))
        return product(hidden, *down)

    return run


def _scaled_mm(weights: Weights) -> Block:
    """cuBLAS by torch; Hopper only."""
    by = F.ScalingType

    def product(x: BlockScaled, data: Tensor, scale: Tensor) -> Tensor:
        formats = (by.BlockWise1x128, scale.t(), by.BlockWise128x128)
        return F.scaled_mm(x.data, data.t(), x.scale.t(), *formats, output_dtype=torch.bfloat16)

    return _block_scaled(product, weights)


def _deep_gemm(weights: Weights) -> Block:
    library = importlib.import_module("deep_gemm")

    def product(x: BlockScaled, data: Tensor, scale: Tensor) -> Tensor:
        out = torch.empty(len(x.data), len(data), dtype=torch.bfloat16, device=data.device)
        library.fp8_gemm_nt((x.data, x.scale[:, : len(x.data)].t()), (data, scale), out)
        return out

    return _block_scaled(product, weights)


def _flashinfer(weights: Weights) -> Block:
    """Its products quantise their rows themselves."""
    product = importlib.import_module("flashinfer.gemm").fp8_blockscale_gemm_sm90
    gate_up, down = quantize_weight(weights.gate_up), quantize_weight(weights.down)
    swiglu = _compiled(reference.swiglu)

    def run(x: Tensor) -> Tensor:
        hidden = swiglu(product(x, gate_up[0], None, gate_up[1]))
        out: Tensor = product(hidden, down[0], None, down[1])
        return out

    return run


PEERS = (
    Peer("bsfp8", "bsfp8", functools.partial(_ours, "bsfp8")),
    Peer("bf16", "bf16", functools.partial(_ours, "bf16")),
    Peer("torch bf16", "bf16", _torch),
    Peer("scaled_mm", "bsfp8", _scaled_mm, row_multiple=4),  # cuBLAS refuses others
    Peer("DeepGEMM", "bsfp8", _deep_gemm),
    Peer("FlashInfer", "bsfp8", _flashinfer),
    Peer("compile bf16", "bf16", _torch_compile),  # last: it takes longest to make
)


def measure(peer: Peer, copies: Sequence[Weights], rows: Sequence[int]) -> list[Timing]:
    """At every number of rows. Raises whatever says that the peer cannot be had here."""
    copies = copies[: num_copies(weight_bytes(shapes_of(MLP), peer.kind))]
    blocks = [peer.make(weights) for weights in copies]
    num_bytes = weight_bytes(shapes_of(MLP), peer.kind)
    timings = []
    for num_rows in rows:
        padded = ceil_div(num_rows, peer.row_multiple) * peer.row_multiple
        x = torch.randn(padded, shapes_of(MLP)[0][1], device="cuda").bfloat16()
        check(peer, blocks[0](x), copies[0].exact(x))
        us = graph_us(
            rotated([functools.partial(block, x) for block in blocks].__getitem__, len(blocks))
        )
        timings.append(Timing(MLP, peer.name, num_rows, us, num_bytes / us / 1000))
    return timings


def check(peer: Peer, out: Tensor, exact: Tensor) -> None:
    """Raises RuntimeError: it computes something else."""
    error = float((out.float() - exact).norm() / exact.norm())
    if not error <= MAX_ERROR[peer.kind]:
        raise RuntimeError(f"its result is off by {error:.3f}")


def reason_of(error: Exception) -> str:
    """In one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench_ttfa.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [peer.name for peer in PEERS]
    parser.add_argument("--rows", type=positive_ints, default=ROWS, help="numbers of rows")
    parser.add_argument(
        "--peers", type=some_of(names), default=names, help=f"some of {','.join(names)}"
    )
    parser.add_argument("--json", type=file_to_write, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    need_cuda(parser)
    warnings.simplefilter("ignore")
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    copies = [Weights.random() for _ in range(num_copies(weight_bytes(shapes_of(MLP), "bsfp8")))]
    timings: list[Timing] = []
    missing: dict[str, str] = {}
    record: dict[str, Any] = {
        "machine": describe_machine(),
        "software": describe_software(),
        "copy_gb_per_s": round(bandwidth),
    }
    for peer in PEERS:
        if peer.name not in options.peers:
            continue
        try:
            measured = measure(peer, copies, options.rows)
            timings += measured
            figures = ", ".join(f"{timing.rows} rows {timing.us:.1f}" for timing in measured)
            print(f"{peer.name}: us, {figures}", flush=True)
        except Exception as error:  # noqa: BLE001 each library has its own
            missing[peer.name] = reason_of(error)
        if options.json:  # as it grows: a peer may take minutes to compile
            record |= {"timings": [asdict(each) for each in timings], "not_available": missing}
            options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{torch.cuda.get_device_name()}: a copy moves {bandwidth:.0f} GB/s")
    print(table(timings, bandwidth))
    for name, reason in missing.items():
        print(f"{name}: not available: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
