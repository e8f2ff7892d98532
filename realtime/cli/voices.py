"""`plosive voices`: list, add and delete a running server's voices."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from clients import PlosiveError
from clients.address import DEFAULT_URL, without_password
from clients.explain import sentence
from clients.voices import Voice, add_voice, delete_voice, list_voices

# Whether an action takes a name, a clip and a text.
_TAKES = {"list": (False,) * 3, "add": (True,) * 3, "delete": (True, False, False)}
_EXAMPLE = "What is said in it."
EXAMPLES = """examples:
  plosive voices                     list them
  plosive voices add bob --clip bob.wav --text "Every word that is said in bob.wav."
  plosive voices delete bob
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", choices=("list", "add", "delete"), default="list", help="default: list"
    )
    parser.add_argument("name", nargs="?", help="of the voice to add or delete")
    parser.add_argument(
        "--clip",
        type=Path,
        metavar="FILE",
        help="add: a recording of the voice, 10 to 30 s of clear speech",
    )
    parser.add_argument("--text", help="add: what is said in the recording, word for word")
    parser.add_argument(
        "--url",
        help=f"the server (default: $PLOSIVE_URL, or else {DEFAULT_URL})",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("PLOSIVE_API_KEY") or None,
        help="for a server that needs one (default: $PLOSIVE_API_KEY)",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """0 when it is done, 1 with one sentence on stderr when it cannot be; wrong usage exits 2."""
    given = (args.name is not None, args.clip is not None, args.text is not None)
    if given != _TAKES[args.action]:
        args.usage_error(_usage(args))
    if not args.url:
        args.url = os.environ.get("PLOSIVE_URL") or DEFAULT_URL
        if args.url != DEFAULT_URL:
            shown = without_password(args.url)
            print(f"plosive voices: using the server at {shown} (PLOSIVE_URL)", file=sys.stderr)
    try:
        _run(args)
    except (PlosiveError, OSError) as error:
        print(
            f"plosive voices: {sentence(error, is_key_given=bool(args.api_key))}", file=sys.stderr
        )
        return 1
    return 0


def _usage(args: argparse.Namespace) -> str:
    """What the action takes, and a line to copy, with what was given."""
    name = shlex.quote(args.name or "bob")
    clip, text = shlex.quote(str(args.clip or f"{name}.wav")), shlex.quote(args.text or _EXAMPLE)
    return {
        "list": "list takes nothing: plosive voices list",
        "add": "add takes a name, a recording and what is said in it: "
        f"plosive voices add {name} --clip {clip} --text {text}",
        "delete": f"delete takes a name alone: plosive voices delete {name}",
    }[str(args.action)]


def _run(args: argparse.Namespace) -> None:
    if args.action == "add":
        voice = add_voice(args.url, args.name, args.clip, args.text, api_key=args.api_key)
        print(f"added {voice.name} ({voice.duration_s:.1f} s)")
        for warning in voice.warnings:
            print(f"plosive voices: warning: {warning}", file=sys.stderr)
    elif args.action == "delete":
        delete_voice(args.url, args.name, api_key=args.api_key)
        print(f"deleted {args.name}")
    else:
        for voice in list_voices(args.url, api_key=args.api_key):
            print(_line(voice))


def _line(voice: Voice) -> str:
    kind = "default" if voice.is_default else "built in" if voice.is_builtin else "added"
    return f"{voice.name:<24} {kind:<9} {voice.duration_s:5.1f} s  {voice.text}"
