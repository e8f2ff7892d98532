"""The correctness gate of 8 bits: greedy decoding in bsfp8, or with KV in fp8, against bf16.

    python -m bench_ttfa.gate_quantised                       # the embedded, trained model
    python -m bench_ttfa.gate_quantised --format bf16 --kv fp8  # 8-bit keys and values alone
    python -m bench_ttfa.gate_quantised --model embedded:s2-pro --streams 64  # its kernels, on a GPU
    python -m bench_ttfa.gate_quantised --model random:s2-pro # S2 Pro's shapes, random, on a GPU

Which kernels run depends on shapes and on how many streams are decoded at once. `embedded:s2-pro` is
the embedded model in S2 Pro's shapes (`widened`); --streams N decodes N at once, some inputs several
times where there are fewer. In 8 bits other kernels run above 1 to 4, 8, 16, 64 and 128 streams, and
from 17 to 64 linears make the norms, which in the embedded model's own shapes they never do.

A trained model must say the same, on inputs that were chosen by bf16 alone (`gate_inputs`):

1. Each format reading its own codes, the semantic tokens of the first NUM_FRAMES greedy frames are
   equal, token for token, of all inputs.
2. Both reading bf16's frames, the same tokens are equal again; and wherever a frame's first other
   code is, among all codebooks, bf16's lead there is below SURE_LEAD: no choice falls the other way
   of which bf16 is sure. Of the choices up to there at least EQUAL_SHARE are the same.
3. The logits' relative error is below the model's bound.

Equal codes of all codebooks are not asked for, since bf16 does not choose them clearly: of the 40
choices of an input the least lead is below 0.09 logits, of 9,000 candidates (six voices, 1,500 texts).
One product of e4m3 values with e4m3 weights is off by 3.7 % of its root mean square (rounding to three
bits of mantissa, twice), which is 0.13 of a logit here, and the whole model is off by no more than
that: the rest is the format's. bf16 is not equal to itself either: with fp32 arithmetic on the same
weights 70 % of all codes are the same and all 40 of one input in five (174 candidates, plain
definitions; of the gate's inputs the verdict tells it). With the slow AR alone in 8 bits it is 58 % and
one input in 43, with both 50 % and none; of the 60 candidates that bf16 is surest of, chosen among the
9,000, none is wholly equal in 8 bits and 14 are with the slow AR alone.

Random weights have no margins to speak of: for them the logits' error is the gate, and the rate of
equal tokens is told by how clear they are in bf16. The bound is 1.1 times what the format itself costs:
0.114 + 0.0202 ln(layers), fitted to the plain definition in fp32 (a CPU, S2 Pro's proportions at a quarter
of its width: 0.136, 0.164 and 0.186 for 3, 12 and 36 layers; at an eighth of it, 0.179 for 36).

Exit code 1: the gate is closed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from bench_ttfa.command import file_to_write, positive_int
from bench_ttfa.gate_inputs import NUM_FRAMES, Rounding, are_of_these_weights, leads_of
from bench_ttfa.gate_models import (
    EMBEDDED,
    WIDENED,
    Decoded,
    Said,
    load,
    model_name,
    said_in_bf16,
)
from bench_ttfa.gpu_timing import need_cuda
from bench_ttfa.system import describe_machine, describe_software
from model.kv_cache import KvFormat
from model.random_model import is_random
from ops.quantize import Kind

# Logits. The error of a logit is 0.13 to 0.26 (root mean square, by codebook), so this is 2.7 times that
# of the difference of two at the worst codebook.
SURE_LEAD = 1.0
EQUAL_SHARE = 0.8  # measured 0.85 to 0.88, and 0.93 to 0.98 of 8-bit keys and values alone
CLEARNESS = (0.0, 1.0, 2.0, 4.0)  # margins in units of that error, for the rates of equal tokens
# Of the logits' relative error. A trained model keeps that of a single product, 0.037: measured 0.03, and
# 0.018 of 8-bit keys and values alone.
TRAINED_BOUND = 0.05
RANDOM_KV_BOUND = 0.1  # of 8-bit keys and values alone; measured 0.036 (3 layers), 0.069 (S2 Pro)
_BLOCK_ERROR, _LAYER_ERROR, _ALLOWANCE = 0.114, 0.0202, 1.1


@dataclass(frozen=True, slots=True)
class Sureness:
    """Choices of a frame up to its first other code, both formats reading bf16's frames."""

    num_choices: int
    num_sure: int  # bf16's lead is SURE_LEAD or more
    equal_share: float
    flipped_lead: float  # the largest lead that was overturned, logits

    def __str__(self) -> str:
        return (
            f"{self.num_choices} choices up to a frame's first other code, {self.equal_share:.1%} equal, "
            f"{self.num_sure} sure; the largest lead overturned is {self.flipped_lead:.2f} logits"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found; `problems` empty: the gate is open."""

    model: str
    device: str
    num_inputs: int
    streams: int  # decoded at once
    tokens_equal: float  # semantic tokens, each its own codes
    codes_equal: float  # all codes, each its own codes
    forced_tokens_equal: float  # semantic tokens when both read bf16's codes
    logit_error: float  # relative
    logit_bound: float
    margin_p10: float  # bf16's, in units of the root mean square error of a logit
    margin_p50: float
    equal_by_margin: tuple[tuple[float, int, float], ...]  # margin from, tokens, share equal
    sureness: Sureness | None  # None: random weights
    rounding: Rounding | None  # None: random weights
    problems: tuple[str, ...]

    def __str__(self) -> str:
        rates = ", ".join(
            f"from {least:g}: {share:.0%} of {count}"
            for least, count, share in self.equal_by_margin
        )
        lines = [
            f"{self.model} on {self.device}, {self.num_inputs} inputs, {NUM_FRAMES} frames, "
            f"{self.streams} streams at once",
            f"  greedy, each its own codes: {self.tokens_equal:.1%} of semantic tokens and "
            f"{self.codes_equal:.1%} of all codes equal",
            f"  both bf16's codes: {self.forced_tokens_equal:.1%} of semantic tokens equal",
            f"  relative error of the logits {self.logit_error:.4f} (at most {self.logit_bound})",
            f"  bf16's margins over that error: p10 {self.margin_p10:.2f}, "
            f"p50 {self.margin_p50:.2f}; equal by margin {rates}",
        ]
        lines += [f"  {each}" for each in (self.sureness, self.rounding) if each]
        return "\n".join([*lines, *(f"  CLOSED: {problem}" for problem in self.problems)])


@torch.inference_mode()
def judge(
    name: str,
    device: torch.device,
    kind: Kind = "bsfp8",
    kv_format: KvFormat = "bf16",
    streams: int | None = None,
) -> Verdict:
    """Decode in bf16 and in the formats given, and compare. Holds one model at a time.

    Args:
        streams: see `said_in_bf16`.
    """
    expected = said_in_bf16(name, device, streams)
    model = load(name, kind, device)
    free, forced = expected.again(model, kv_format)
    bound = TRAINED_BOUND
    if not expected.inputs:
        bound = RANDOM_KV_BOUND if kind == "bf16" else random_bound(model.config.slow.num_layers)
    del model
    verdict = _verdict(name, device, bound, expected, free, forced)
    if not expected.inputs:
        return verdict
    sureness, problems = _judge_trained(expected, free.frames, forced.frames)
    return replace(
        verdict,
        sureness=sureness,
        rounding=expected.rounding,
        problems=(*verdict.problems, *problems),
    )


def random_bound(num_layers: int) -> float:
    """Of the logits' relative error when weights are random."""
    return round(_ALLOWANCE * (_BLOCK_ERROR + _LAYER_ERROR * math.log(num_layers)), 3)


def _verdict(
    name: str,
    device: torch.device,
    bound: float,
    said: Said,
    free: Decoded,
    forced: Decoded,
) -> Verdict:
    expected = said.decoded
    same, forced_same = free.frames == expected.frames, forced.frames == expected.frames
    # What the end token's logit is on random weights (see model.random_model) is no measure.
    difference = (forced.logits - expected.logits)[..., :-1]
    error = float(difference.norm() / expected.logits[..., :-1].norm())
    margins = expected.margins / difference.square().mean().sqrt()
    is_bad = not error <= bound  # NaN is
    return Verdict(
        model=name,
        device=str(device),
        num_inputs=len(expected.frames),
        streams=said.streams,
        tokens_equal=float(same[..., 0].float().mean()),
        codes_equal=float(same[..., 1:].float().mean()),
        forced_tokens_equal=float(forced_same[..., 0].float().mean()),
        logit_error=error,
        logit_bound=bound,
        margin_p10=float(margins.quantile(0.1)),
        margin_p50=float(margins.quantile(0.5)),
        equal_by_margin=_equal_by_margin(margins, forced_same[..., 0]),
        sureness=None,
        rounding=None,
        problems=(f"the logits' relative error {error:.4f} is above {bound}",) if is_bad else (),
    )


def _equal_by_margin(margins: Tensor, same: Tensor) -> tuple[tuple[float, int, float], ...]:
    rates = []
    for least, most in pairwise([*CLEARNESS, torch.inf]):
        within = same[(margins >= least) & (margins < most)]
        if len(within):
            rates.append((least, len(within), float(within.float().mean())))
    return tuple(rates)


def _judge_trained(said: Said, free: Tensor, forced: Tensor) -> tuple[Sureness, list[str]]:
    """Rules 1 and 2, on frames i32 [N, F, 1+K]."""
    chosen, expected, problems = said.inputs, said.decoded.frames, []
    for how, frames in (("its own codes", free), ("bf16's codes", forced)):
        is_other = (frames[..., 0] != expected[..., 0]).any(1)
        problems += [
            f"reading {how}, other semantic tokens for {chosen[i].voice}: {chosen[i].text}"
            for i in is_other.nonzero().flatten().tolist()
        ]
    is_other = forced[..., 1:] != expected[..., 1:]
    num_other = is_other.cumsum(-1)
    is_first = is_other & (num_other == 1)
    leads = leads_of(said.prompts, expected)
    is_choice = is_first | (num_other == 0)
    num_choices = int(is_choice.sum())
    sureness = Sureness(
        num_choices=num_choices,
        num_sure=int((is_choice & (leads >= SURE_LEAD)).sum()),
        equal_share=1.0 - int(is_first.sum()) / num_choices,
        flipped_lead=float(leads[is_first].max()) if is_first.any() else 0.0,
    )
    for i, frame, codebook in (is_first & (leads >= SURE_LEAD)).nonzero().tolist():
        problems.append(
            f"{chosen[i].voice}, frame {frame}, codebook {codebook}: a lead of "
            f"{float(leads[i, frame, codebook]):.2f} logits is overturned: {chosen[i].text}"
        )
    if sureness.equal_share < EQUAL_SHARE:
        share = f"{sureness.equal_share:.3f}"
        problems.append(f"of the choices {share} are the same, expected at least {EQUAL_SHARE}")
    return sureness, problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench_ttfa.gate_quantised",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        type=model_name,
        default=EMBEDDED,
        help=f'"{EMBEDDED}", "{WIDENED}" or "random:..."',
    )
    parser.add_argument("--format", choices=["bf16", "bsfp8"], default="bsfp8", help="the weights")
    parser.add_argument("--kv", choices=["bf16", "fp8"], default="bf16", help="keys and values")
    parser.add_argument(
        "--streams", type=positive_int, help="decoded at once (default: as many as inputs)"
    )
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--json", type=file_to_write, help="write the record here")
    args = parser.parse_args(argv)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    is_large = args.model == WIDENED or args.model.startswith("random:s2-pro")
    need_cuda(parser, "cuda" if is_large else device)
    verdict = judge(args.model, torch.device(device), args.format, args.kv, args.streams)
    print(verdict)
    if not is_random(args.model) and not are_of_these_weights():
        print(
            "  the inputs were chosen with other weights: python -m bench_ttfa.gate_inputs --write"
        )
    if args.json:
        record = {"machine": describe_machine(), "software": describe_software(), **asdict(verdict)}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if verdict.problems else 0


if __name__ == "__main__":
    sys.exit(main())
