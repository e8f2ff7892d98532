"""Train the DualAR on encoded speech.

    python -m model.embedded.recipe.train_dual_ar --codes codes.npz --corpus corpus.tsv --phonemes vocab.json \
        --out DIR --minutes 5

Rows are dialogues of one voice: a reference, then turn after turn, cut at one of three lengths; so the model knows
contexts up to `max_seq_len` as well as the first turn after a reference. The held-out loss is taken with the averaged
weights; `OUT/dual_ar.safetensors` (bf16) is the best of them. Run the same command again to resume. `--start-from` begins a
run with weights that are there already, under a fresh optimiser and schedule.

`--wait` starts before the codes exist: kernels are compiled and steps captured on random rows, then the weights are
set back and training begins when the file appears.
"""

import argparse
import copy
import json
import math
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from model.embedded.recipe.dialogues import Dialogues, Rows, rows_from
from model.embedded.recipe.speakers import VOICES
from model.embedded.recipe.stepping import (
    StepRunner,
    Stopwatch,
    adamw,
    command_parser,
    log_record,
    save_atomically,
    set_lr,
)
from model.embedded.recipe.tokens import VOCAB_SIZE, PromptTokens, build_vocab, read_phonemes
from model.embedded.recipe.trainable import TOY, DualARConfig, TrainableDualAR, losses

METRICS = ("semantic", "residual", "accuracy", "grad")
LENGTHS = ((448, 0.5), (1024, 0.3), (2048, 0.2))  # (positions, share of the steps)
TOY_LENGTHS = ((160, 0.7), (256, 0.3))


class Trainer:
    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        torch.manual_seed(args.seed)
        self.config = TOY if args.toy else DualARConfig()
        self.model = TrainableDualAR(self.config, args.dropout).to(device)
        if args.start_from:
            weights = {k: v.float() for k, v in load_file(args.start_from).items()}
            self.model.load_state_dict(weights)
        self.average = copy.deepcopy(self.model).eval().requires_grad_(False)
        lengths = TOY_LENGTHS if args.toy else LENGTHS
        self.shapes = [(max(1, args.positions // n), n, share) for n, share in lengths]
        self.index = [
            torch.zeros(rows, n + 1, dtype=torch.int32, device=device) for rows, n, _ in self.shapes
        ]
        self.sums = torch.zeros(len(METRICS), device=device)
        self._make_optimizer()
        # The data may arrive after the steps are captured, so the flat arrays have room from the start.
        capacity = int(args.capacity_positions)
        self.tokens = torch.randint(0, VOCAB_SIZE, (capacity,), dtype=torch.int32, device=device)
        self.codes = torch.zeros(
            capacity, self.config.num_codebooks, dtype=torch.int16, device=device
        )
        if args.compile:
            for layer in (*self.model.slow.layers, *self.model.audio_decoder.layers):
                layer.compile(dynamic=False)
        self.runners = [
            StepRunner(lambda i=i: self.step(i), args.graph) for i in range(len(self.shapes))
        ]

    def _make_optimizer(self) -> None:
        named = list(self.model.named_parameters())
        decayed = [p for name, p in named if p.dim() == 2 and "embeddings" not in name]
        plain = [p for name, p in named if p.dim() != 2 or "embeddings" in name]
        groups = [
            {"params": decayed, "weight_decay": self.args.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.optimizer = adamw(groups, (0.9, 0.95), self.device)

    def autocast(self) -> torch.autocast:
        on = self.device.type == "cuda"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=on)

    def load_data(self, dialogues: Dialogues) -> None:
        size = len(dialogues.tokens)
        if size > len(self.tokens):
            raise SystemExit(f"--capacity-positions {len(self.tokens)} is less than {size}")
        self.tokens[:size], self.codes[:size] = dialogues.tokens, dialogues.codes

    def step(self, shape: int) -> None:
        """One update from the rows named by `self.index[shape]`."""
        at = self.index[shape]
        flat = at.flatten()
        tokens = self.tokens.index_select(0, flat).view_as(at).long()
        codes = self.codes.index_select(0, flat).view(*at.shape, -1).long()
        rows = rows_from(tokens, codes, self.config.im_end)
        with self.autocast():
            loss = losses(self.model, rows, self.args.noise, self.args.fast_share)
        self.optimizer.zero_grad(set_to_none=True)
        (loss.semantic + loss.residual).backward()
        grad = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        values = (loss.semantic, loss.residual, loss.accuracy, grad)
        self.sums += torch.stack([v.detach().float() for v in values])

    @torch.no_grad()
    def update_average(self, step: int, every: int) -> None:
        decay = min(self.args.ema, (1 + step) / (10 + step)) ** every
        parameters = [p.detach() for p in self.model.parameters()]
        torch._foreach_lerp_(list(self.average.parameters()), parameters, 1 - decay)

    @torch.no_grad()
    def held_loss(self, held: list[Rows]) -> tuple[float, float]:
        totals = torch.zeros(2, device=self.device)
        with self.autocast():
            for rows in held:
                loss = losses(self.average, rows, 0.0, 0.5)
                totals += torch.stack([loss.semantic, loss.residual]).float()
        semantic, residual = (totals / len(held)).tolist()
        return semantic, residual

    def warm_up(self) -> None:
        """Compile and capture every shape on random rows, then undo what these steps did."""
        start_s = time.monotonic()
        weights = [p.detach().clone() for p in self.model.parameters()]
        for shape, runner in enumerate(self.runners):
            for _ in range(StepRunner.NUM_WARMUP + 1):
                self.index[shape].random_(0, len(self.tokens))
                runner()
        with torch.no_grad():
            for p, initial in zip(self.model.parameters(), weights, strict=True):
                p.copy_(initial)
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()
        self.sums.zero_()
        print(f"warm after {time.monotonic() - start_s:.0f} s", flush=True)


def save(trainer: Trainer, progress: dict[str, float], out: Path) -> None:
    state = {
        "progress": progress,
        "model": trainer.model.state_dict(),
        "average": trainer.average.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
    }
    save_atomically(lambda path: torch.save(state, path), out / "train.pt")


def save_weights(trainer: Trainer, progress: dict[str, float], out: Path) -> None:
    weights = {
        name: value.to(torch.bfloat16).contiguous().cpu()
        for name, value in trainer.average.state_dict().items()
    }
    metadata = {key: str(value) for key, value in progress.items()}
    save_atomically(lambda path: save_file(weights, path, metadata), out / "dual_ar.safetensors")


def learning_rate(args: argparse.Namespace, step: int, done: float) -> float:
    cosine = 0.03 + 0.97 * (0.5 + 0.5 * math.cos(math.pi * min(1.0, done)))
    return args.lr * min(1.0, (step + 1) / args.warmup_steps) * cosine


def evaluate(
    trainer: Trainer, held: dict[str, list[Rows]], progress: dict[str, float], out: Path
) -> dict[str, float]:
    """Held-out losses of the averaged weights; keep them if their sum is the best so far."""
    record: dict[str, float] = {}
    for name, rows in held.items():
        if rows:
            semantic, residual = trainer.held_loss(rows)
            record |= {f"{name}_semantic": semantic, f"{name}_residual": residual}
    total = sum(record.values()) if record else math.nan
    if not total >= progress["best"]:  # also when there was nothing to measure
        progress["best"] = total
        progress["best_step"] = progress["step"]
        save_weights(trainer, progress, out)
    return {name: round(value, 4) for name, value in record.items()}


def train(trainer: Trainer, dialogues: Dialogues, progress: dict[str, float], out: Path) -> None:
    args, watch = trainer.args, Stopwatch(progress["spent_s"])
    size = trainer.shapes[0][:2]
    held = {"held": dialogues.held_rows(*size), "stranger": dialogues.stranger_rows(*size)}
    batches = dialogues.batches(trainer.shapes, args.seed + int(progress["step"]))
    num_positions, last_step = 0, int(progress["step"])
    if not last_step:  # what `--start-from` gave is the best so far
        log_record({"step": 0, **evaluate(trainer, held, progress, out)}, out / "dual_ar.jsonl")
    while True:
        step = int(progress["step"])
        done = max(watch.total_s / (args.minutes * 60), step / args.steps)
        if done >= 1:
            break
        set_lr(trainer.optimizer, [learning_rate(args, step, done)] * 2)
        shape, index = next(batches)
        trainer.index[shape].copy_(index, non_blocking=True)
        num_positions += index.numel()
        trainer.runners[shape]()
        step += 1
        progress.update(step=step, spent_s=watch.total_s)
        if step % args.average_every == 0:
            trainer.update_average(step, args.average_every)
        if step % args.log_every == 0:
            means = (trainer.sums / (step - last_step)).tolist()
            trainer.sums.zero_()
            record = {name: round(v, 4) for name, v in zip(METRICS, means, strict=True)}
            rate = num_positions / watch.lap_ms()
            record |= {"step": step, "s": round(watch.total_s), "kpos_per_s": round(rate)}
            num_positions, last_step = 0, step
            if step % args.held_every == 0:
                record |= evaluate(trainer, held, progress, out)
            log_record(record, out / "dual_ar.jsonl")
            if not math.isfinite(record["semantic"]):
                raise SystemExit("the loss is not finite; the last checkpoint is kept")
        if watch.since("save", args.save_every_s):
            save(trainer, progress, out)
    record = evaluate(trainer, held, progress, out)
    save(trainer, progress, out)
    print(f"done: {json.dumps({**progress, **record})}", flush=True)


def parser() -> argparse.ArgumentParser:
    p = command_parser("train_dual_ar", __doc__)
    p.add_argument("--codes", type=Path, nargs="+", required=True, help="one or more codes.npz")
    p.add_argument("--corpus", type=Path, required=True, help="lines of text<TAB>phonemes")
    p.add_argument("--phonemes", type=Path, required=True, help="the teacher's vocab.json")
    p.add_argument(
        "--own-share", type=float, help="of the rows, for the ten voices; else as they have speech"
    )
    p.add_argument("--out", type=Path, required=True, help="folder of weights, state and losses")
    p.add_argument("--start-from", type=Path, help="dual_ar.safetensors to go on from")
    p.add_argument(
        "--minutes", type=float, default=5.0, help="length of the run, earlier parts included"
    )
    p.add_argument(
        "--steps", type=int, default=10**9, help="or its length in steps, whichever ends first"
    )
    p.add_argument("--until", type=float, help="end at this Unix time, whatever --minutes says")
    p.add_argument("--wait", action="store_true", help="warm up, then wait for --codes")
    p.add_argument("--positions", type=int, default=49152, help="a step")
    p.add_argument(
        "--capacity-positions", type=float, default=4e7, help="memory set aside for --codes"
    )
    p.add_argument("--dropout", type=float, default=0.12, help="of each block's output")
    p.add_argument(
        "--noise", type=float, default=0.1, help="share of the codes that are read wrong"
    )
    p.add_argument(
        "--fast-share", type=float, default=0.25, help="positions the fast AR learns from"
    )
    p.add_argument("--lr", type=float, default=1.5e-3, help="its peak")
    p.add_argument("--weight-decay", type=float, default=0.05, help="of matrices")
    p.add_argument("--warmup-steps", type=int, default=300, help="until the rate is at its peak")
    p.add_argument("--ema", type=float, default=0.998, help="decay a step of the averaged weights")
    p.add_argument("--average-every", type=int, default=4, help="steps")
    p.add_argument("--held-every", type=int, default=200, help="steps between held-out losses")
    p.add_argument("--log-every", type=int, default=100, help="steps")
    p.add_argument("--save-every-s", type=float, default=60.0, help="checkpoints")
    p.add_argument("--graph", action="store_true", help="capture each step as a CUDA graph")
    p.add_argument("--compile", action="store_true", help="the layers")
    p.add_argument("--toy", action="store_true", help="a tiny model, for tests")
    p.add_argument("--seed", type=int, default=3, help="of weights, splits and rows")
    return p


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args, device)
    progress = {"step": 0.0, "spent_s": 0.0, "best": math.inf, "best_step": 0.0}
    if args.wait:
        trainer.warm_up()
    if (args.out / "train.pt").exists():
        state = torch.load(args.out / "train.pt", map_location=device, weights_only=True)
        trainer.model.load_state_dict(state["model"])
        trainer.average.load_state_dict(state["average"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        progress = state["progress"]
        print(f"resumed at step {progress['step']:.0f}", flush=True)
    while args.wait and not all(file.exists() for file in args.codes):
        time.sleep(0.5)
    prompt = PromptTokens(build_vocab(read_phonemes(args.phonemes)))
    dialogues = Dialogues(args.codes, args.corpus, prompt, device, args.own_share)
    trainer.load_data(dialogues)
    own = sum(v < len(VOICES) for v in dialogues.voices)
    print(
        f"{dialogues.hours():.1f} h, {own} voices, {len(dialogues.voices) - own} other speakers, "
        f"{len(dialogues.strangers)} held out",
        flush=True,
    )
    if args.until:
        args.minutes = (progress["spent_s"] + args.until - time.time()) / 60
    train(trainer, dialogues, progress, args.out)


if __name__ == "__main__":
    main()
