"""`plosive`: the composition root. Nothing else constructs an engine, a server or a client.

Sub-commands import what they need when they run: `plosive --help` and `plosive say --url` must not
pay two seconds for torch.
"""

import argparse
import io
import shlex
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

COMMANDS = {
    "serve": "run the server: text in over a WebSocket, Opus out",
    "say": "speak one text, through a server that is running or a local one started for it",
    "voices": "list, add and delete a server's voices",
    "quantize": "write an 8-bit checkpoint of a checkpoint",
    "make-checkpoint": "write real files of a published geometry with random weights",
}
OURS = ("realtime", "model", "ops", "clients", "bench_ttfa")


def main(argv: list[str] | None = None) -> int:
    for stream in (sys.stdin, sys.stdout):  # of any encoding
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in OURS:
            raise
        print(
            f"plosive: the package {error.name!r} is missing, which a server needs; "
            'in a clone of Plosive: pip install -e ".[server]"',
            file=sys.stderr,
        )
        return 1


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata  # no other command waits for it

        print(f"plosive {metadata.version('plosive')}")
        parser.exit()


def _main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="plosive",
        description="A real-time WebSocket voice-agent runtime.",
        epilog="Each command has its own --help.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version, and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((word for word in argv if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == wanted:
            _module(name).add_arguments(subparser)
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    args, unknown = parser.parse_known_args(argv)
    if unknown:  # said with the usage of the command that does not know it
        why = f"unrecognized arguments: {' '.join(unknown)}"
        if args.command == "say" and not any(word.startswith("-") for word in unknown):
            text = shlex.quote(" ".join((args.text, *unknown)))
            why += f"; a text of several words is quoted: plosive say {text}"
        subparsers.choices[args.command].error(why)
    run: Callable[[argparse.Namespace], int] = _module(args.command).run
    return run(args)


def _module(command: str) -> ModuleType:
    return import_module(f"realtime.cli.{command.replace('-', '_')}")


if __name__ == "__main__":
    sys.exit(main())
