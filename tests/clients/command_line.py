"""A command as `plosive` runs it, and what a server that wants a key answers."""

import argparse
import json

MISSING_KEY = json.dumps({"error": {"code": "missing_api_key", "message": "send a header"}})
HOW_TO_GIVE_IT = "this server needs an API key: give it with --api-key KEY, or in PLOSIVE_API_KEY\n"


def run(command, *words: str) -> int:
    parser = argparse.ArgumentParser(prog="plosive")
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))
