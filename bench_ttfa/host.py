"""`python -m bench_ttfa.host`: what a packet costs the host, and how many streams that allows."""

import argparse
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench_ttfa import report
from bench_ttfa.command import exit_status, positive_float, positive_int
from bench_ttfa.progress import Display
from bench_ttfa.run import Config, Level, sweep, utc_stamp
from bench_ttfa.worker import Connection
from clients import AudioFormat
from clients.local_server import LocalServer
from realtime.wire import PACKET_MS

_DESCRIPTION = """\
Paced real-time streams from an engine without a model: what event loop, Opus and sockets cost.

  python -m bench_ttfa.host                          16 and 64 streams for 10 s each
  python -m bench_ttfa.host --streams 128 400 --seconds 15
  python -m bench_ttfa.host --host-ms 0.5            Python's share of a decode step, as with a model
  python -m bench_ttfa.host --serve --max-slots 512  the rest of the line are options of the server
"""
_EPILOG = """\
us/packet is CPU time by thread of the server, user + system: the event loop's user time is framing,
its system time is sending. A thread that reaches 100 % of a core is the ceiling; all threads of one
process together hold one lock (the GIL) in their user time, Opus itself excepted.
"step late" is how late the engine's thread wakes from a step: what the others cost it.
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench_ttfa.host",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option(
        "--streams",
        type=positive_int,
        nargs="+",
        default=[16, 64],
        metavar="N",
        help="a level each (default: 16 64)",
    )
    option("--seconds", type=positive_float, default=10.0, help="each level (default: 10)")
    option("--step-ms", type=positive_float, default=5.0, help="of the engine (default: 5)")
    option("--host-ms", type=float, default=0.3, help="of it, Python (default: 0.3)")
    option(
        "--chunk-frames",
        type=positive_int,
        default=4,
        help="that the engine gives at once (default: 4)",
    )
    option("--codec", choices=("opus", "pcm_s16le"), default="opus", help="default: opus")
    option("--rate-hz", type=positive_int, default=24_000, help="of the packets (default: 24000)")
    option("--out", type=Path, help="directory for a JSON file")
    option(
        "--serve",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="OPTION",
        help="options of the server",
    )
    args = parser.parse_args(argv)
    return exit_status("bench_ttfa.host", partial(_run, args))


def _run(args: argparse.Namespace) -> int:
    if args.out is not None:
        report.make_writable(args.out)  # before anything is measured
    display = Display()
    model = f"tone:{args.step_ms},{args.host_ms},{args.chunk_frames}"
    options = ["--model", model, "--max-slots", str(max(args.streams)), *args.serve]
    with ExitStack() as stack:
        server = stack.enter_context(LocalServer(options))
        audio_format = AudioFormat(codec=args.codec, sample_rate=args.rate_hz)
        levels = [Level("paced", 0, count, seconds=args.seconds) for count in args.streams]
        config = Config(
            tuple(levels),
            Connection(server.url, None, audio_format, 1, None, None),
            keeps_going=True,
        )
        try:
            result = sweep(config, server.pid, display.step, display.show)
        finally:
            display.clear()
    summary = report.summarize(result, utc_stamp())
    print("\n\n".join(host_table(level) for level in summary["levels"]))
    if args.out is not None:
        print(report.write(summary, args.out))
    return 0


def host_table(level: dict[str, Any]) -> str:
    """One level: each thread's microseconds per packet and share of a core."""
    packets_per_s = _packets_per_s(level)
    rows = [["thread", "user", "system", "us/packet", "of a core"]]
    total = 0.0
    for name, each in level["host_us_per_packet"].items():
        both = each["user"] + each["system"]
        total += both
        share = f"{both * packets_per_s / 1e4:.1f} %"
        rows.append([name, f"{each['user']:.1f}", f"{each['system']:.1f}", f"{both:.1f}", share])
    rows.append(["all", "", "", f"{total:.1f}", f"{total * packets_per_s / 1e4:.1f} %"])
    metrics = level["server_metrics"]
    late = [metrics.get(f"plosive_engine_step_late_ms_p{p}", 0.0) for p in (50, 99)]
    gap = level["worst_gap_ms"] or {"p50": 0.0, "p99": 0.0, "max": 0.0}
    head = (
        f"{level['name']}: {packets_per_s:.0f} packets/s, C50 {_share(level['c50'])}, "
        f"C100 {_share(level['c100'])}, worst gap p99 {gap['p99']:.0f} ms, max {gap['max']:.0f} ms, "
        f"step late p50 {late[0]:.2f} ms, p99 {late[1]:.2f} ms, "
        f"clients valid: {report.validity(level)}"
    )
    return "\n".join([head, *report.align(rows)])


def _packets_per_s(level: dict[str, Any]) -> float:
    audio_ms = sum(turn["num_packets"] for turn in level["turns"]) * PACKET_MS
    return float(audio_ms / PACKET_MS / level["window_s"])


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


if __name__ == "__main__":
    sys.exit(main())
