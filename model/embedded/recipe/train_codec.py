"""Train the spectral codec on teacher shards, while the teacher may still be writing them.

    python -m model.embedded.recipe.train_codec --shards DIR --out DIR --minutes 12

Run the same command again to resume. `OUT/codec.safetensors` holds the averaged weights in bf16 with the config in
its metadata, `OUT/train.pt` everything needed to go on, `OUT/codec.jsonl` the losses.

What makes it learn: variance-preserving init with tied quantiser projections, latents that fade from continuous to
quantised over the first steps, revival of unused codebook rows, log losses with an additive floor, and
discriminators that are given some updates before their gradient reaches the codec. If they are still at chance
after `--adv-check-steps`, the run goes on without them.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from model.codec.spectral import SpectralCodec, SpectralConfig
from model.embedded.recipe.encode import load_codec
from model.embedded.recipe.losses import (
    Discriminators,
    SpectralLoss,
    discriminator_loss,
    generator_loss,
    level,
)
from model.embedded.recipe.quantizer import Quantized, TrainableQuantizer
from model.embedded.recipe.shards import AudioBank, Batch
from model.embedded.recipe.stepping import (
    StepRunner,
    Stopwatch,
    adamw,
    command_parser,
    log_record,
    save_atomically,
    set_lr,
)

NUM_PHONEMES = 178
TOY = SpectralConfig(
    encoder_dim=32,
    encoder_hidden_dim=64,
    encoder_blocks=1,
    dim=64,
    ffn_dim=64,
    decoder_dim=64,
    decoder_hidden_dim=96,
    decoder_blocks=2,
)
METRICS = ("mel", "stft", "commit", "phoneme", "grad", "d_spectrum", "d_period", "adv", "match")


class Trainer:
    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.config = TOY if args.toy else SpectralConfig()
        torch.manual_seed(args.seed)
        self.codec = SpectralCodec(self.config).to(device)
        if args.decoder_of:
            self.codec = load_codec(args.decoder_of, device).train()
            self.config = self.codec.config
            self.codec.encoder.requires_grad_(False)
            self.codec.quantizer.requires_grad_(False)
        self.quantize = TrainableQuantizer(self.codec, args.batch * args.frames)
        self.phonemes = nn.Sequential(
            nn.Linear(self.config.dim, 256), nn.GELU(), nn.Linear(256, NUM_PHONEMES)
        ).to(device)
        small = {"spectrum_dim": 8, "period_dim": 4} if args.toy else {}
        self.discriminators = Discriminators(**small).to(device)
        self.spectral_loss = SpectralLoss(self.config.sample_rate).to(device)
        self.average = {k: v.detach().clone() for k, v in self.codec.named_parameters()}
        self._make_optimizers()
        num_samples = args.frames * self.config.frame_samples
        self.wav = torch.zeros(args.batch, num_samples, device=device)
        self.labels = torch.zeros(args.batch, args.frames, dtype=torch.int64, device=device)
        # Scalars that change from step to step live on the device: a captured step reads them there.
        self.continuous_share = torch.ones((), device=device)
        self.adv_weight = torch.zeros((), device=device)
        self.sums = torch.zeros(len(METRICS), device=device)
        if args.compile:
            for module in (*self.codec.encoder.blocks, *self.codec.decoder.blocks):
                module.compile(dynamic=False)

    def _make_optimizers(self) -> None:
        named = [(name, p) for name, p in self.codec.named_parameters() if p.requires_grad]
        books = [p for name, p in named if "codebook" in name]
        others = [p for name, p in named if "codebook" not in name]
        groups = [
            {"params": [*others, *self.phonemes.parameters()], "weight_decay": 1e-3},
            {"params": books, "weight_decay": 0.0},
        ]
        self.optimizer = adamw(groups, (0.8, 0.99), self.device)
        self.d_optimizer = adamw(
            [{"params": list(self.discriminators.parameters()), "weight_decay": 1e-3}],
            (0.8, 0.99),
            self.device,
        )

    def autocast(self) -> torch.autocast:
        on = self.device.type == "cuda"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=on)

    def load_batch(self, batch: Batch) -> None:
        self.wav.copy_(batch.wav)
        self.labels.copy_(batch.phonemes)

    def reconstruct(self) -> tuple[Tensor, Quantized]:
        if self.args.decoder_of:
            return self.decode_own_codes()
        rows, stages = len(self.wav), self.config.num_codebooks
        features = self.codec.encoder.features(self.wav)
        with self.autocast():
            latent = self.codec.encoder.latent(features)
        continuous = torch.rand(rows, device=self.device) < self.continuous_share
        kept = torch.randint(1, stages + 1, (rows,), device=self.device)
        drop = torch.rand(rows, device=self.device) < self.args.stage_dropout
        kept = torch.where(drop & ~continuous, kept, torch.full_like(kept, stages))
        quantized = self.quantize(latent, kept, continuous)
        with self.autocast():
            hidden = self.codec.decoder.hidden(quantized.latent)
        return self.codec.decoder.synthesize(hidden.float()), quantized

    def decode_own_codes(self) -> tuple[Tensor, Quantized]:
        """The decoder alone learns, from the codes that the finished encoder gives."""
        with torch.no_grad():
            latent = self.codec.encoder.latent(self.codec.encoder.features(self.wav))
            latent = self.codec.quantizer.decode(self.codec.quantizer.encode(latent))
        with self.autocast():
            hidden = self.codec.decoder.hidden(latent)
        none = latent.new_zeros(())
        return self.codec.decoder.synthesize(hidden.float()), Quantized(latent, latent, none, none)

    def crops(self, made: Tensor) -> tuple[Tensor, Tensor]:
        """Some rows, a random stretch of each, brought to one level: real, made: f32 [R, crop]"""
        rows, crop = self.args.adv_rows, self.args.adv_crop
        start = torch.randint(0, made.shape[1] - crop + 1, (rows, 1), device=self.device)
        index = start + torch.arange(crop, device=self.device)
        real = self.wav[:rows].gather(1, index)
        return level(real, real), level(made[:rows].gather(1, index), real)

    def step_discriminators(self, real: Tensor, made: Tensor) -> Tensor:
        with self.autocast():
            outputs = self.discriminators(torch.cat([real, made.detach()]))
        losses = discriminator_loss(outputs)
        self.d_optimizer.zero_grad(set_to_none=True)
        losses.mean().backward()
        nn.utils.clip_grad_norm_(self.discriminators.parameters(), 10.0)
        self.d_optimizer.step()
        return losses.detach()

    def adversarial_losses(self, real: Tensor, made: Tensor) -> tuple[Tensor, Tensor]:
        self.discriminators.requires_grad_(False)
        with self.autocast():
            with torch.no_grad():
                real_maps = self.discriminators(real)
            made_maps = self.discriminators(made)
        self.discriminators.requires_grad_(True)
        return generator_loss(made_maps, real_maps)

    def step(self, adversarial: bool) -> None:
        """One update from the batch in `self.wav`; losses are added to `self.sums`."""
        args = self.args
        made, quantized = self.reconstruct()
        mel, stft = self.spectral_loss(made, self.wav)
        logits = self.phonemes(quantized.first)
        phoneme = F.cross_entropy(logits.flatten(0, 1), self.labels.flatten(), label_smoothing=0.05)
        loss = args.mel_weight * mel + stft + 0.25 * quantized.commit + quantized.codebook + phoneme
        d_spectrum = d_period = adv = match = mel.new_zeros(())
        if adversarial:
            real_crop, made_crop = self.crops(made)
            d_losses = self.step_discriminators(real_crop, made_crop)
            num_spectrum = len(self.discriminators.spectrum)
            d_spectrum, d_period = d_losses[:num_spectrum].mean(), d_losses[num_spectrum:].mean()
            adv, match = self.adversarial_losses(real_crop, made_crop)
            loss = loss + self.adv_weight * (args.adv_share * adv + args.match_share * match)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        grad = nn.utils.clip_grad_norm_(parameters, args.clip)
        self.optimizer.step()
        values = (mel, stft, quantized.commit, phoneme, grad, d_spectrum, d_period, adv, match)
        self.sums += torch.stack([v.detach().float() for v in values])

    @torch.no_grad()
    def update_average(self, step: int, every: int) -> None:
        decay = min(self.args.ema, (1 + step) / (10 + step)) ** every
        current = [p.detach() for p in self.codec.parameters()]
        torch._foreach_lerp_(list(self.average.values()), current, 1 - decay)

    def state(self) -> dict[str, object]:
        return {
            "codec": self.codec.state_dict(),
            "phonemes": self.phonemes.state_dict(),
            "discriminators": self.discriminators.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "d_optimizer": self.d_optimizer.state_dict(),
            "average": self.average,
            "usage": self.quantize.usage,
        }

    def load_state(self, state: dict[str, dict[str, object]], restart_discriminators: bool) -> None:
        self.codec.load_state_dict(state["codec"])
        self.phonemes.load_state_dict(state["phonemes"])
        self.optimizer.load_state_dict(state["optimizer"])
        if not restart_discriminators:
            self.discriminators.load_state_dict(state["discriminators"])
            self.d_optimizer.load_state_dict(state["d_optimizer"])
        for name, value in state["average"].items():
            self.average[name].copy_(value)
        self.quantize.usage.copy_(state["usage"])


@dataclass(frozen=True)
class Progress:
    step: int = 0
    spent_s: float = 0.0
    adv_from_step: int = -1  # -1: the discriminators have not started
    adv_given_up: bool = False


def save(trainer: Trainer, progress: Progress, out: Path) -> None:
    weights = {k: v.to(torch.bfloat16).contiguous().cpu() for k, v in trainer.average.items()}
    config = json.dumps({"type": "spectral", **asdict(trainer.config)})
    metadata = {"codec_config": config, "step": str(progress.step)}
    save_atomically(lambda path: save_file(weights, path, metadata), out / "codec.safetensors")
    state = {"progress": asdict(progress), **trainer.state()}
    save_atomically(lambda path: torch.save(state, path), out / "train.pt")


def learning_rate(args: argparse.Namespace, step: int, done: float) -> float:
    """Linear warm-up, constant, then a cosine to 2 % over the last part of the run."""
    late = max(0.0, (done - args.cosine_from) / (1 - args.cosine_from))
    cosine = 0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * late))
    return min(1.0, (step + 1) / args.warmup_steps) * cosine


def schedule(trainer: Trainer, progress: Progress, done: float) -> Progress:
    """Set the scalars of the next step; decide when the discriminators start."""
    args, step = trainer.args, progress.step
    factor = learning_rate(args, step, done)
    set_lr(trainer.optimizer, [args.lr * factor, 2 * args.lr * factor])
    set_lr(trainer.d_optimizer, [args.adv_lr * factor])
    trainer.continuous_share.fill_(max(0.0, 1 - step / args.continuous_steps))
    if progress.adv_from_step < 0 and done >= args.adv_from and not args.no_adversary:
        progress = replace(progress, adv_from_step=step)
    since = step - progress.adv_from_step - args.adv_alone_steps
    started = progress.adv_from_step >= 0 and not progress.adv_given_up
    trainer.adv_weight.fill_(min(1.0, max(0.0, since / args.adv_ramp_steps)) if started else 0.0)
    return progress


def report(
    trainer: Trainer, progress: Progress, num_steps: int, step_ms: float
) -> dict[str, float]:
    means = (trainer.sums / num_steps).tolist()
    trainer.sums.zero_()
    line = {name: round(value, 4) for name, value in zip(METRICS, means, strict=True) if value}
    used = (trainer.quantize.usage > 0.02).sum(1).tolist()
    record = {"step": progress.step, "s": round(progress.spent_s), "ms": round(step_ms, 1), **line}
    return {**record, "used": used, "lr": float(trainer.optimizer.param_groups[0]["lr"])}


def is_hopeless(args: argparse.Namespace, progress: Progress, record: dict[str, float]) -> bool:
    """True once the discriminators have had their time and are still at chance."""
    if progress.adv_from_step < 0 or progress.adv_given_up:
        return False
    had = progress.step - progress.adv_from_step
    chance = min(record.get("d_spectrum", 1.0), record.get("d_period", 1.0)) >= args.adv_chance
    return had >= args.adv_check_steps and chance


def train(trainer: Trainer, bank: AudioBank, progress: Progress, out: Path) -> Progress:
    args, watch = trainer.args, Stopwatch(progress.spent_s)
    runners = {
        adv: StepRunner(lambda adv=adv: trainer.step(adv), args.graph) for adv in (False, True)
    }
    last_step = progress.step
    while True:
        done = max(watch.total_s / (args.minutes * 60), progress.step / args.steps)
        if done >= 1:
            break
        progress = schedule(trainer, replace(progress, spent_s=watch.total_s), done)
        frame_samples = trainer.config.frame_samples
        trainer.load_batch(bank.batch(args.batch, args.frames, frame_samples, args.start_share))
        runners[progress.adv_from_step >= 0 and not progress.adv_given_up]()
        progress = replace(progress, step=progress.step + 1)
        step = progress.step
        if step % args.average_every == 0:
            trainer.update_average(step, args.average_every)
        if step % args.revive_every == 0 and done < 0.6 and not args.decoder_of:
            trainer.quantize.revive()
        if step % args.log_every == 0:
            steps = step - last_step
            record = report(trainer, progress, steps, watch.lap_ms() / steps)
            record["hours"], last_step = round(bank.hours, 2), step
            log_record(record, out / "codec.jsonl")
            if not math.isfinite(record.get("mel", 0.0)):
                raise SystemExit("the loss is not finite; the last checkpoint is kept")
            if is_hopeless(args, progress, record):
                print("discriminators at chance: going on without them", flush=True)
                progress = replace(progress, adv_given_up=True)
        if step % args.refresh_every == 0:
            bank.refresh()
        if watch.since("save", args.save_every_s):
            save(trainer, progress, out)
    progress = replace(progress, spent_s=watch.total_s)
    save(trainer, progress, out)
    print(f"done: {progress.step} steps, {progress.spent_s:.0f} s", flush=True)
    return progress


def wait_for_audio(bank: AudioBank, min_hours: float) -> None:
    bank.refresh()
    while bank.hours < min_hours:
        print(f"waiting for shards: {bank.hours:.2f} of {min_hours} h", flush=True)
        time.sleep(2)
        bank.refresh()


def parser() -> argparse.ArgumentParser:
    p = command_parser("train_codec", __doc__)
    add: Callable[..., object] = p.add_argument
    add("--shards", type=Path, required=True, help="folder of a*.npy, l*.npy and m*.npy")
    add("--out", type=Path, required=True, help="folder of weights, state and losses")
    add("--minutes", type=float, default=12.0, help="length of the run, earlier parts included")
    add("--steps", type=int, default=10**9, help="or its length in steps, whichever ends first")
    add("--until", type=float, help="end at this Unix time, whatever --minutes says")
    add("--min-hours", type=float, default=0.02, help="wait for this much audio before starting")
    add("--capacity-hours", type=float, default=1.0, help="memory set aside for audio")
    add("--batch", type=int, default=48, help="crops a step")
    add("--frames", type=int, default=32, help="length of a crop, 40 ms each")
    add("--start-share", type=float, default=0.3, help="crops that begin where a clip does")
    add("--lr", type=float, default=6e-4, help="its peak")
    add("--clip", type=float, default=5.0, help="of the gradient's norm")
    add("--warmup-steps", type=int, default=200, help="until the rate is at its peak")
    add("--cosine-from", type=float, default=0.4, help="share of the run before the rate falls")
    add("--continuous-steps", type=int, default=500, help="until every row is quantised")
    add("--stage-dropout", type=float, default=0.15, help="rows that lose their last codebooks")
    add("--mel-weight", type=float, default=15.0, help="weight of the log-mel loss")
    add("--revive-every", type=int, default=50, help="steps between looks for unused codes")
    add("--ema", type=float, default=0.999, help="decay a step of the averaged weights")
    add("--average-every", type=int, default=5, help="steps")
    add("--decoder-of", type=Path, help="go on with the decoder of this codec; codes stay valid")
    add("--no-adversary", action="store_true", help="no discriminators")
    add("--restart-adversary", action="store_true", help="on resume, new discriminators")
    add("--adv-from", type=float, default=0.25, help="share of the run before discriminators")
    add("--adv-alone-steps", type=int, default=500, help="their updates before the codec's")
    add("--adv-ramp-steps", type=int, default=1000, help="until they have their full weight")
    add("--adv-check-steps", type=int, default=3000, help="their time to leave chance")
    add("--adv-chance", type=float, default=0.48, help="loss from which on they are at chance")
    add("--adv-lr", type=float, default=4e-4, help="of the discriminators")
    add("--adv-rows", type=int, default=32, help="crops that they see a step")
    add("--adv-crop", type=int, default=12000, help="samples of these")
    add("--adv-share", type=float, default=2.0, help="weight of the adversarial loss")
    add("--match-share", type=float, default=1.0, help="weight of the feature matching loss")
    add("--graph", action="store_true", help="capture a step as one CUDA graph")
    add("--compile", action="store_true", help="the ConvNeXt blocks")
    add("--toy", action="store_true", help="a tiny codec, for tests")
    add("--log-every", type=int, default=100, help="steps")
    add("--refresh-every", type=int, default=400, help="steps between looks for new shards")
    add("--save-every-s", type=float, default=60.0, help="checkpoints")
    add("--seed", type=int, default=1, help="of weights and crops")
    return p


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    args.out.mkdir(parents=True, exist_ok=True)
    trainer, progress = Trainer(args, device), Progress()
    if (args.out / "train.pt").exists():
        state = torch.load(args.out / "train.pt", map_location=device, weights_only=True)
        progress = Progress(**state["progress"])
        trainer.load_state(state, args.restart_adversary)
        torch.manual_seed(args.seed + progress.step)
        if args.restart_adversary:
            progress = replace(progress, adv_from_step=-1, adv_given_up=False)
        print(f"resumed at step {progress.step}", flush=True)
    bank = AudioBank(args.shards, args.capacity_hours, device)
    wait_for_audio(bank, args.min_hours)
    if args.until:
        args.minutes = (progress.spent_s + args.until - time.time()) / 60
    train(trainer, bank, progress, args.out)


if __name__ == "__main__":
    main()
