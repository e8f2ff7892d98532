"""`plosive make-checkpoint`: real files in a published layout with random weights."""

import argparse
import sys
import time
from pathlib import Path

from model.geometries import GEOMETRIES
from realtime.cli.output_folder import output_folder
from realtime.errors import PlosiveError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Writes config.json, sharded safetensors with their index (bf16), codec.pth, a stand-in "
        "tokenizer.json and voices. `plosive serve --model OUT` serves it; what it says is noise. "
        "Sizes: s2-pro 10.7 GB, s1-mini 3.3 GB, tiny 10 MB. "
        "The same model without files: plosive serve --model random:s2-pro"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to make; must not exist")
    parser.add_argument("--like", choices=GEOMETRIES, required=True, help="whose shapes")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: 0)")
    parser.add_argument(
        "--frames", type=int, default=60, help="length of every spoken segment (default: 60)"
    )
    parser.add_argument(
        "--reference-s",
        type=int,
        default=10,
        metavar="SECONDS",
        help="length of the default voice's reference (default: 10); "
        "ref-0s, ref-10s and ref-30s are always there",
    )


def run(args: argparse.Namespace) -> int:
    from model.errors import ModelError
    from model.random_checkpoint import plan_checkpoint, write_checkpoint
    from model.random_model import RandomModel

    started_s = time.monotonic()
    try:
        made_up = RandomModel(args.like, args.frames, args.reference_s, args.seed)
        plan = plan_checkpoint(args.like)
        opened = output_folder(args.out, plan.disk_nbytes, args.like, num_shown=plan.nbytes)
        with opened as (folder, on_bytes):
            write_checkpoint(made_up, folder, on_bytes)
    except (PlosiveError, ModelError, OSError) as error:
        why = error.message if isinstance(error, PlosiveError) else error
        print(f"plosive make-checkpoint: {why}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - started_s
    print(f"{args.out}: {plan.nbytes / 1e6:,.0f} MB in {seconds:.0f} s")
    return 0
