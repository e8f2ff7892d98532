"""`python -m bench_ttfa`: options in, sweep, table and JSON out."""

import argparse
import math
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench_ttfa import report
from bench_ttfa.command import count, exit_status, length_s, positive_float, positive_int
from bench_ttfa.plot import can_plot, plot
from bench_ttfa.progress import Display
from bench_ttfa.references import reference_voices
from bench_ttfa.run import (
    MAX_SESSIONS_PER_PROCESS,
    UNPACED_MS,
    Config,
    Level,
    sweep,
    utc_stamp,
)
from bench_ttfa.system import num_cores
from bench_ttfa.worker import Connection
from bench_ttfa.workload import KINDS
from clients import AudioFormat
from clients.local_server import LocalServer

_DESCRIPTION = """\
Latency of a Plosive server, measured from outside through the Python client.

  python -m bench_ttfa                            c = 1, 2, 4 on a local server started for it
  python -m bench_ttfa --url http://host:8765 --server-pid 4242 -c 8 32 64 --turns 500
  python -m bench_ttfa -c --rate 2 5 10           open loop: 2, 5, then 10 new turns a second
  python -m bench_ttfa -c --paced 128 256 400     listeners in real time, until continuity breaks
  python -m bench_ttfa -c --references 0 10 30    TTFA against the length of the speaker reference
  python -m bench_ttfa --words-per-s 15           text arrives word by word, as from an LLM
  python -m bench_ttfa.host                       what event loop, Opus and sockets cost, no model
"""
_EPILOG = """\
Closed loop (-c N): N sessions, each says its next turn when the last one is done. The server may run
ahead of playback as far as it allows, so that the real-time factor is its own and not the pace.
Open loop (--rate R): turns arrive at random at R per second, each in a new session, paced as
agents get it. A closed loop waits for a slow server and so hides queueing; an open loop does not.
Paced (--paced N): N sessions, each says its next turn when a listener has heard the last one; the
server's lead cap holds. Larger N are left out once a stream stalled for over 100 ms.
References and text lengths (--references, --lengths) are closed loops of one session. A reference
that no voice has is made of the server's own speech, and deleted afterwards.

A run without options says 104 turns, 13 minutes of speech in all: that takes up to 8 minutes on two
CPU cores. How far it is is shown on stderr. --seconds bounds every level instead. A run that is
interrupted (Ctrl-C) tells the levels it has completed.

No text is ever said twice. Read no latency without the continuity (C50, C100) below it. Under the
tables each level has a waterfall: the stages of its turns on the server, so that a figure can be
explained. What each figure means is in the JSON file, under "definitions". Beside it comes a plot
(PNG), where matplotlib is installed: pip install -e '.[bench]'.
"""
_OPEN_LOOP_SLOTS = 16
_PACED_S = 20.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench_ttfa",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_level_arguments(parser)
    _add_load_arguments(parser)
    _add_server_arguments(parser)
    args = parser.parse_args(argv)
    others = (args.rate, args.at_once, args.paced, args.references, args.lengths)
    if not _concurrencies(args) and not any(others):
        parser.error("nothing to run: -c is empty and no other load is asked for")
    if args.url and args.serve:
        parser.error("--serve is for a local server; --url names another")
    return exit_status("bench_ttfa", partial(_run, args))


def _add_level_arguments(parser: argparse.ArgumentParser) -> None:
    """Which levels there are."""
    option = parser.add_argument_group("levels").add_argument
    numbers: dict[str, Any] = {"type": positive_int, "nargs": "*", "default": [], "metavar": "N"}
    option("-c", "--concurrency", **numbers | {"default": None}, help="closed loops")
    option("--at-once", **numbers, help="closed loops that begin together, whatever --ramp says")
    option("--rate", **numbers | {"type": positive_float, "metavar": "R"}, help="open loops")
    option("--paced", **numbers, help="paced streams")
    option("--keep-going", action="store_true", help="to more streams than those that stalled")
    option(
        "--references",
        **numbers | {"type": length_s, "metavar": "SECONDS"},
        help="speaker references of these lengths; 0: without one",
    )
    option("--lengths", **numbers | {"metavar": "CHARS"}, help="texts of about these lengths")


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """How long each level is, and what is said in it."""
    option = parser.add_argument_group("load").add_argument
    option("--turns", type=positive_int, default=30, help="per level (default: 30)")
    option("--seconds", type=positive_float, help="each level lasts so long (default: --turns)")
    option(
        "--ramp",
        type=length_s,
        default=0.0,
        metavar="SECONDS",
        help="closed loops of --seconds begin spread over as long before (default: all at once)",
    )
    option(
        "--paced-seconds",
        type=positive_float,
        default=_PACED_S,
        help="each paced level (default: 20)",
    )
    option(
        "--warmup",
        type=count,
        default=2,
        help="turns of each session that are not measured (default: 2)",
    )
    option("--texts", choices=KINDS, default="mixed", help="default: mixed")
    option(
        "--chars",
        type=positive_int,
        metavar="N",
        help="of each text, about, at every level (default: as they come, 60 to 250)",
    )
    option(
        "--words-per-s", type=positive_float, help="stream the text at this pace (default: whole)"
    )
    option("--voice", help="default: the server's")
    option("--codec", choices=("opus", "pcm_s16le"), default="opus")
    option("--max-lead-ms", type=positive_int, help="overrides what the loops ask for")
    option("--seed", type=count, default=1, help="of texts, arrivals and sampling")


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--url", help="a running one (default: start a local one)")
    server.add_argument(
        "--key",
        default=os.environ.get("PLOSIVE_API_KEY"),
        help="API key, with --url (default: PLOSIVE_API_KEY)",
    )
    server.add_argument(
        "--server-pid", type=positive_int, help="whose memory and CPU time to watch, with --url"
    )
    server.add_argument(
        "--serve",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="OPTION",
        help='the rest of the line are options of the local "plosive serve"',
    )
    server.add_argument(
        "--out",
        type=Path,
        default=report.RUNS_DIR,
        help="directory of the JSON and the plot (default: bench_ttfa/runs, which git ignores; how "
        "a record is filed: bench_ttfa/results/README.md)",
    )


def _run(args: argparse.Namespace) -> int:
    load_before = os.getloadavg()[0]
    report.make_writable(args.out)  # a sweep takes minutes
    display = Display()
    with ExitStack() as stack:
        server: LocalServer | None = None
        if args.url is None:
            display.step("starting a local server")
            server = stack.enter_context(LocalServer(_serve_options(args)))
        url = args.url or (server.url if server else "")
        pid = server.pid if server else args.server_pid
        connection = _connection(args, url)
        try:
            if args.references:
                display.step("speaker references")
            voices = stack.enter_context(reference_voices(connection, args.references))
            config = _config(args, connection, voices)
            result = sweep(config, pid, display.step, display.show)
        finally:
            display.clear()
        result.server_start_s = server.ready_s if server else None
        result.load_before = load_before
        status = _tell(report.summarize(result, utc_stamp()), args.out)
    return 130 if result.was_interrupted else status


def _tell(summary: dict[str, Any], directory: Path) -> int:
    path = report.write(summary, directory)
    print(report.text(summary))
    print(path)
    if can_plot():
        picture = path.with_suffix(".png")
        plot(summary, picture)
        print(picture)
    else:
        print("no plot: matplotlib is not installed (pip install -e '.[bench]')")
    turns = [turn for level in summary["levels"] for turn in level["turns"]]
    return 1 if all(turn["error"] for turn in turns) else 0


def _serve_options(args: argparse.Namespace) -> list[str]:
    """As many slots as the largest level needs, and a lead that closed loops never use up, unless
    the caller says otherwise. (Audio piles up over a session's turns: at 60 s a loop is paced.)"""
    opened = (_OPEN_LOOP_SLOTS for _ in args.rate)
    num_slots = max([4, *_concurrencies(args), *args.at_once, *args.paced, *opened])
    options = {"--max-slots": str(num_slots), "--max-lead-cap-ms": str(UNPACED_MS)}
    wanted = {name: value for name, value in options.items() if name not in args.serve}
    return [*(word for option in wanted.items() for word in option), *args.serve]


def _concurrencies(args: argparse.Namespace) -> list[int]:
    return [1, 2, 4] if args.concurrency is None else list(args.concurrency)


def _connection(args: argparse.Namespace, url: str) -> Connection:
    return Connection(
        url=url,
        voice=args.voice,
        format=AudioFormat(codec=args.codec),
        seed=args.seed,
        max_lead_ms=args.max_lead_ms,
        words_per_s=args.words_per_s,
        api_key=args.key if args.url else None,  # a server of one's own asks for none
    )


def _config(args: argparse.Namespace, connection: Connection, voices: dict[float, str]) -> Config:
    num_chars = args.chars
    ramp_s = args.ramp if args.seconds else 0.0
    closed = partial(Level, "closed", int(args.turns), seconds=args.seconds, ramp_s=ramp_s)
    alone = partial(
        closed, concurrency=1, ramp_s=0.0
    )  # of which no session is in step with another
    paced = partial(Level, "paced", 0, seconds=args.paced_seconds, num_chars=num_chars)
    opened = partial(Level, "open", num_chars=num_chars)
    levels = [
        *(closed(concurrency=c, num_chars=num_chars) for c in _concurrencies(args)),
        *(
            closed(concurrency=c, num_chars=num_chars, ramp_s=0.0, axis="at once, streams", value=c)
            for c in sorted(args.at_once)
        ),
        *(opened(_open_turns(args, rate), rate_per_s=rate) for rate in args.rate),
        *(paced(concurrency=n) for n in sorted(args.paced)),
        *(
            alone(voice=voice, num_chars=num_chars, axis="reference, s", value=length_s)
            for length_s, voice in sorted(voices.items())
        ),
        *(
            alone(num_chars=num, axis=_text_axis(args), value=float(num))
            for num in sorted(args.lengths)
        ),
    ]
    return Config(
        levels=tuple(levels),
        connection=connection,
        kind=args.texts,
        warmup_turns=args.warmup,
        sessions_per_process=sessions_per_process(
            max([*_concurrencies(args), *args.at_once], default=1), num_cores()
        ),
        keeps_going=args.keep_going,
    )


def _text_axis(args: argparse.Namespace) -> str:
    streamed = f" at {args.words_per_s:g} words/s" if args.words_per_s else ""
    return f"text{streamed}, characters"


def sessions_per_process(concurrency: int, num_cores: int) -> int:
    """Few where there are cores for more processes: a burst for one session delays its neighbours'
    first packets (64 sessions, 8 to a process: 36 ms at the 95th percentile)."""
    share = math.ceil(concurrency / max(1, num_cores // 2))
    return max(1, min(MAX_SESSIONS_PER_PROCESS, share))


def _open_turns(args: argparse.Namespace, rate: float) -> int:
    """As many as arrive in the time that every level has."""
    return max(1, round(rate * args.seconds)) if args.seconds else int(args.turns)


if __name__ == "__main__":
    sys.exit(main())
