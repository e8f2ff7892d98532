"""`plosive voices`: list, add and delete a running server's voices."""

import argparse
import os
import sys
from pathlib import Path

from clients import PlosiveError
from clients.voices import Voice, add_voice, delete_voice, list_voices

DEFAULT_URL = "http://localhost:8765"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", choices=("list", "add", "delete"), default="list", help="default: list"
    )
    parser.add_argument("name", nargs="?", help="of the voice to add or delete")
    parser.add_argument("--clip", type=Path, metavar="FILE", help="add: a recording of the voice")
    parser.add_argument("--text", help="add: what is said in the recording")
    parser.add_argument(
        "--url",
        default=os.environ.get("PLOSIVE_URL", DEFAULT_URL),
        help=f"the server (default: $PLOSIVE_URL, or else {DEFAULT_URL})",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("PLOSIVE_API_KEY"),
        help="for a server that needs one (default: $PLOSIVE_API_KEY)",
    )
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """0 when it is done, 1 with one sentence on stderr when it cannot be; wrong usage exits 2."""
    if (args.action == "list") != (args.name is None):
        args.usage_error("add and delete take the voice's NAME, list takes none")
    if (args.action == "add") != (args.clip is not None and args.text is not None):
        args.usage_error("add takes --clip FILE and --text TEXT, the others take neither")
    try:
        _run(args)
    except (PlosiveError, OSError) as error:
        message = error.message if isinstance(error, PlosiveError) else str(error)
        print(f"plosive voices: {message}", file=sys.stderr)
        return 1
    return 0


def _run(args: argparse.Namespace) -> None:
    if args.action == "add":
        voice = add_voice(args.url, args.name, args.clip, args.text, api_key=args.api_key)
        print(f"added {voice.name} ({voice.duration_s:.1f} s)")
    elif args.action == "delete":
        delete_voice(args.url, args.name, api_key=args.api_key)
        print(f"deleted {args.name}")
    else:
        for voice in list_voices(args.url, api_key=args.api_key):
            print(_line(voice))


def _line(voice: Voice) -> str:
    kind = "default" if voice.is_default else "built in" if voice.is_builtin else "added"
    return f"{voice.name:<24} {kind:<9} {voice.duration_s:5.1f} s  {voice.text}"
