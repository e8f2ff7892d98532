"""The codec's streaming decode alone: time per call at a batch size and frames per call.

    python -m bench_ttfa.codec --model random:s2-pro --batch 1,8,64 --frames 1,2,4

A call continues `batch` streams by `frames` frames each, as the engine's vocode thread does; on
CUDA it is one captured graph. `us` is the median of calls whose weights are not in the L2, which
another kernel has filled in between, as decode does in life; `us_hot` is that of calls one after
another. `host_us` is the host's time to give the device a call, with the frames before it, as the
vocode thread does. `realtime_streams` is how many streams play at once if the device did nothing else.
`snr_db` compares the samples of a stream with those of the plain decoder in fp32.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench_ttfa.command import file_to_write, positive_ints
from bench_ttfa.gpu_timing import need_cuda, need_model
from bench_ttfa.system import describe_machine, describe_software
from model.codec import Codec, load_codec
from model.codec.dac import DacCodec
from model.embedded import embedded_path
from model.random_model import RandomModel, is_random
from realtime.pingpong.codec_calls import CodecRunner

NUM_CALLS = 30
_SNR_FRAMES = 48
_FLUSH_BYTES = 256 << 20  # several times the L2
_MIN_RUN_S = 0.3  # on the CPU


@dataclass(frozen=True, slots=True)
class CallTime:
    """Of one batch size and number of frames."""

    batch: int
    frames: int
    us: float
    us_hot: float
    host_us: float
    frames_per_s: float  # of all streams, from `us`
    realtime_streams: int


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench_ttfa.codec",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", default="embedded", help='a checkpoint\'s path, "embedded" or "random:..."'
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: cuda where there is one, else cpu",
    )
    parser.add_argument(
        "--batch", type=positive_ints, default=[1, 8, 64], help="streams per call (default: 1,8,64)"
    )
    parser.add_argument(
        "--frames", type=positive_ints, default=[1, 2, 4], help="frames per call (default: 1,2,4)"
    )
    parser.add_argument("--json", type=file_to_write, help="write the record here")
    options = parser.parse_args(arguments)
    need_cuda(parser, options.device)
    need_model(parser, options.model)
    with torch.inference_mode():
        for record in measure(options.model, options.device, options.batch, options.frames):
            calls = record["calls"]
            print(line_of(calls[-1]) if calls else headline(record), flush=True)
            if options.json:  # as it grows: capturing a call's graphs takes seconds
                options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(
    model: str, device: str, batches: Sequence[int], frames: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """The record as it grows: first without a call, then with one more each time."""
    codec = build(model, torch.device(device))
    plain = build(model, torch.device(device), is_fused=False) if is_dac(codec) else codec
    calls: list[dict[str, Any]] = []
    record: dict[str, Any] = {
        "model": model,
        "device": device,
        "machine": describe_machine(),
        "software": describe_software(),
        "state_bytes_per_stream": state_bytes(codec),
        "snr_db": round(snr_db(codec, plain, device), 1) if plain is not codec else None,
        "calls": calls,
    }
    yield record
    for batch, count in itertools.product(batches, frames):
        calls.append(asdict(time_call(codec, device, batch, count)))
        yield record


def headline(record: Mapping[str, Any]) -> str:
    return (
        f"{record['model']} on {record['device']}: SNR against fp32 {record['snr_db']} dB\n"
        "batch frames       us   us hot  host us  frames/s  real-time streams"
    )


def line_of(call: Mapping[str, Any]) -> str:
    c = call
    return (
        f"{c['batch']:5d} {c['frames']:6d} {c['us']:8.0f} {c['us_hot']:8.0f} {c['host_us']:8.0f} "
        f"{c['frames_per_s']:9.0f}  {c['realtime_streams']:d}"
    )


def build(model: str, device: torch.device, *, is_fused: bool | None = None) -> Codec:
    if is_random(model):
        return RandomModel.parse(model).codec(device, torch.float32, is_fused=is_fused)
    path = embedded_path() if model == "embedded" else Path(model)
    return load_codec(path, device, torch.float32, is_fused=is_fused)


def is_dac(codec: Codec) -> bool:
    return isinstance(codec, DacCodec)


def state_bytes(codec: Codec) -> int:
    """Of one stream."""
    return sum(tensor.nbytes for tensor in codec.state_tensors(codec.init_state(1)))


def snr_db(codec: Codec, plain: Codec, device: str) -> float:
    """Of one stream, frame by frame, against the plain decoder's whole clip."""
    codes = random_codes(codec, 1, _SNR_FRAMES, device)
    state, rows = codec.init_state(1), torch.zeros(1, dtype=torch.int64, device=device)
    pieces = [codec.decode_stream(piece, state, rows) for piece in torch.split(codes, 1, dim=2)]
    want = plain.decode(codes)
    error = (torch.cat(pieces, dim=1) - want).norm() / want.norm()
    return -20 * math.log10(float(error) + 1e-12)


def random_codes(codec: Codec, batch: int, frames: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    size = (batch, codec.num_codebooks, frames)
    codes = torch.randint(0, min(codec.codebook_sizes), size, generator=generator)
    return codes.int().to(device)


def time_call(codec: Codec, device: str, batch: int, frames: int) -> CallTime:
    codes = random_codes(codec, batch, frames, device)
    state, rows = codec.init_state(batch), torch.arange(batch, device=device)

    def call() -> object:
        return codec.decode_stream(codes, state, rows)

    us, us_hot = _time_cuda(call) if device.startswith("cuda") else _time_cpu(call)
    host_us = _host_us(codec, torch.device(device), batch, frames)
    frames_per_s = batch * frames / us * 1e6
    frame_rate = codec.sample_rate / codec.frame_samples
    return CallTime(
        batch, frames, us, us_hot, host_us, frames_per_s, int(frames_per_s / frame_rate)
    )


def _host_us(codec: Codec, device: torch.device, batch: int, frames: int) -> float:
    """Median over calls, without the waiting; on the CPU it is the whole call."""
    runner = CodecRunner(codec, device, batch, frames=(frames,))
    runner.capture(iter)
    slots = list(range(min(batch, runner.max_streams(frames))))
    times = []
    for step in range(NUM_CALLS):
        first = step * frames
        codes = [random_codes(codec, len(slots), 1, str(device))[..., 0]] * frames
        start = time.perf_counter()
        for frame, rows in enumerate(codes, first):
            runner.put(rows, [runner.place(slot, frame) for slot in slots])
        places = [runner.place(slot, first + i) for slot in slots for i in range(frames)]
        call = runner.call(slots, places, frames)
        times.append(1e6 * (time.perf_counter() - start))
        call.wait()
        runner.done(call)
    return statistics.median(times)


def _time_cuda(call: Callable[[], object]) -> tuple[float, float]:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    medians = []
    for is_cold in (True, False):
        times = []
        for _ in range(NUM_CALLS):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            if is_cold:
                flush.fill_(1)
            start.record()
            graph.replay()
            end.record()
            times.append((start, end))
        torch.cuda.synchronize()
        medians.append(statistics.median(1e3 * a.elapsed_time(b) for a, b in times))
    del result
    return medians[0], medians[1]


def _time_cpu(call: Callable[[], object]) -> tuple[float, float]:
    call()
    times: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < _MIN_RUN_S or len(times) < 3:
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    us = statistics.median(times)
    return us, us


if __name__ == "__main__":
    sys.exit(main())
