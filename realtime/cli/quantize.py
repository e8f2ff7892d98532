"""`plosive quantize`: a checkpoint -> one whose matrices are 8 bits wide."""

import argparse
import sys
import time
from pathlib import Path

from model.embedded import embedded_path
from realtime.cli.output_folder import output_folder
from realtime.errors import PlosiveError

FORMATS = {
    "bsgemm": "e4m3 with a scale per 128x128, for Hopper's kernels",
    "mxfp8": "e4m3 with a power of two per 1x32, made for Blackwell, whose kernel is compiled and "
    "was never run; expanded to bf16 on loading",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Quantises the matrices of all blocks of both transformers; embeddings, norms and heads stay "
        "as they are, codec, tokenizer and voices are copied. Works on a piece of a matrix at a "
        "time: memory does not grow with the checkpoint. OUT appears when it is complete. "
        "`plosive serve --model OUT` serves it; `plosive serve --format bsfp8` quantises an "
        "unquantised checkpoint while it loads, to the same values as bsgemm."
    )
    parser.add_argument("source", metavar="IN", help='checkpoint directory, or "embedded"')
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to make; must not exist")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        type=lambda name: {"bsfp8": "bsgemm"}.get(name, name),  # as `serve --format` calls it
        required=True,
        help="; ".join(f"{name}: {what}" for name, what in FORMATS.items()),
    )


def run(args: argparse.Namespace) -> int:
    from model.errors import ModelError
    from model.quantize_checkpoint import plan_quantization, write_quantized

    started_s = time.monotonic()
    source = embedded_path() if args.source == "embedded" else Path(args.source)
    try:
        if not source.is_dir():
            raise PlosiveError("model_unusable", f"there is no checkpoint directory {source}")
        plan = plan_quantization(source, args.format)
        needed = plan.nbytes + plan.copied_nbytes
        with output_folder(args.out, needed, args.format, num_shown=plan.nbytes) as opened:
            write_quantized(plan, *opened)
    except (PlosiveError, ModelError, OSError) as error:
        why = error.message if isinstance(error, PlosiveError) else error
        print(f"plosive quantize: {why}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - started_s
    print(
        f"{args.out}: weights {plan.source_nbytes / 1e6:,.0f} MB -> {plan.nbytes / 1e6:,.0f} MB "
        f"({args.format}) in {seconds:.0f} s"
    )
    return 0
