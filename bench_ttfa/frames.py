"""The captured frame alone: frames/s of the DualAR at a batch size and a context, weights cold.

    python -m bench_ttfa.frames --model random:s2-pro --format bf16,bsfp8 --batch 1,16,64
    python -m bench_ttfa.frames ... --gate bench_ttfa/baselines/h200-s2-pro.json  # exit code 1: slower

A frame is what decode launches (`realtime.pingpong.frames`): slow AR, sampling, the copy of the
ends, the fast AR, in one CUDA graph, launched frame after frame as in life, so that every frame
reads its weights anew from memory. `eager` is the same model in plain PyTorch, in one graph too.
Times are those of CUDA events around RUN_FRAMES frames, the median of some runs.

The gate and the rule for its baseline: `bench_ttfa.gate_speed`.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench_ttfa.command import file_to_write, positive_int, positive_ints, some_of
from bench_ttfa.gate_speed import baseline, gate
from bench_ttfa.gpu_timing import need_cuda, need_model
from bench_ttfa.system import describe_machine, describe_software
from model.dual_ar import DualAR
from model.kv_cache import KVCache, KvFormat
from model.loader import load_dual_ar
from model.random_model import RandomModel, is_random
from model.sampling import SamplingParams
from realtime.pingpong.device import Event
from realtime.pingpong.frames import FrameRunner

FORMATS = ("eager", "bf16", "bsfp8")
RUN_FRAMES = 32  # contexts grow by as many within a run; --context is their mean
NUM_RUNS = 7


@dataclass(frozen=True, slots=True)
class FrameTime:
    """Of one batch size."""

    format: str
    batch: int
    context: int  # positions that a stream reads, mean
    frame_ms: float
    frames_per_s: float  # of all streams
    fastest_ms: float  # of the runs
    slowest_ms: float


@dataclass(frozen=True, slots=True)
class Subject:
    """A model ready to be timed, and what it takes on the device."""

    model: DualAR
    cache: KVCache
    runner: FrameRunner

    def memory(self) -> dict[str, float]:
        """MiB."""
        sizes = {
            "weights": self.model.nbytes,
            "kv": self.cache.kv.nbytes,
            "graphs": self.runner.graph_bytes,
        }
        return {name: round(size / 2**20, 1) for name, size in sizes.items()}


def load(name: str, form: str, device: torch.device) -> DualAR:
    """A checkpoint directory or `random:...`, run in a format."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if is_random(name):
        model = RandomModel.parse(name).dual_ar(device, dtype)
    else:
        model = load_dual_ar(Path(name), device, dtype)
    if form != "eager":
        model.use_kernels("bsfp8" if form == "bsfp8" else "bf16")
    return model


def prepare(
    model: DualAR, batches: Sequence[int], context: int, kv_format: KvFormat = "bf16"
) -> Subject:
    """Graphs of the batch sizes, over a cache full of noise."""
    num_slots, max_len = max(batches), context + RUN_FRAMES
    cache = model.new_cache(num_slots, max_len, kv_format=kv_format)
    for layer in cache.kv.unbind(0):
        layer[:] = torch.randn(layer.shape, device=model.device, dtype=model.dtype)
    runner = FrameRunner(model, cache, num_slots, batches)
    runner.capture(iter)
    return Subject(model, cache, runner)


def time_frames(subject: Subject, form: str, batch: int, context: int) -> FrameTime:
    slots, row = list(range(batch)), [0] * subject.runner.state.rows.shape[1]
    row[0] = subject.model.semantic_ids[0]
    times_ms = []
    for run in range(NUM_RUNS + 1):
        subject.runner.start(
            [
                subject.runner.state.start_words(
                    slot, row, context - RUN_FRAMES // 2, SamplingParams(seed=1000 * run + slot)
                )
                for slot in slots
            ]
        )
        begun, over = (Event(subject.model.device, is_timed=True) for _ in range(2))
        begun.record()
        for _ in range(RUN_FRAMES):
            subject.runner.launch(slots)
        over.record()
        over.wait_on_host()
        times_ms.append(begun.ms_until(over) / RUN_FRAMES)
    times_ms = times_ms[1:]  # the first warms up
    frame_ms = statistics.median(times_ms)
    return FrameTime(
        format=form,
        batch=batch,
        context=context,
        frame_ms=round(frame_ms, 4),
        frames_per_s=round(1000 * batch / frame_ms, 1),
        fastest_ms=round(min(times_ms), 4),
        slowest_ms=round(max(times_ms), 4),
    )


def _key(result: FrameTime) -> str:
    return f"{result.format} c={result.batch} context={result.context}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench_ttfa.frames",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", default="random:s2-pro", help="a checkpoint (default: random:s2-pro)"
    )
    parser.add_argument(
        "--format", type=some_of(FORMATS), default=FORMATS, help=f"default: {','.join(FORMATS)}"
    )
    parser.add_argument(
        "--kv", choices=["bf16", "fp8"], default="bf16", help="keys and values (default: bf16)"
    )
    parser.add_argument(
        "--batch", type=positive_ints, default=[1, 16, 64], help="streams (default: 1,16,64)"
    )
    parser.add_argument(
        "--context", type=positive_int, default=600, help="positions that each reads (default: 600)"
    )
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--json", type=file_to_write, help="write everything here")
    parser.add_argument("--gate", type=baseline, metavar="FILE", help="compare with a baseline")
    return parser


@torch.inference_mode()
def run(args: argparse.Namespace) -> tuple[list[FrameTime], dict[str, dict[str, float]]]:
    """Times, and memory in MiB by format."""
    results, memory = [], {}
    device = torch.device(args.device)
    for form in args.format:
        model = load(str(args.path), form, device)
        subject = prepare(model, args.batch, args.context, args.kv)
        name = form if args.kv == "bf16" else f"{form}, {args.kv} KV"
        memory[name] = subject.memory()
        print(f"{name}: MiB {memory[name]}", flush=True)
        for batch in args.batch:
            result = time_frames(subject, name, batch, args.context)
            print(
                f"{_key(result)}: {result.frame_ms:.3f} ms ({result.fastest_ms:.3f} to "
                f"{result.slowest_ms:.3f}), {result.frames_per_s:,.0f} frames/s",
                flush=True,
            )
            results.append(result)
        del model, subject
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return results, memory


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    need_cuda(parser, args.device)
    if args.device == "cpu":
        parser.error("argument --device: this times CUDA devices alone")
    args.path = need_model(parser, args.model)
    if args.gate and not args.gate.is_file():
        parser.error(f"argument --gate: {args.gate}: there is no such file")
    gpu = torch.cuda.get_device_name(args.device)
    results, memory = run(args)
    record = {
        "model": args.model,
        "gpu": gpu,
        "machine": describe_machine(),
        "software": describe_software(),
        "memory_mib": memory,
        "frames": [asdict(result) for result in results],
    }
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return gate(record, args.gate) if args.gate else 0


if __name__ == "__main__":
    sys.exit(main())
