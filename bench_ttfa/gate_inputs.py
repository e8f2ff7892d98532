"""The inputs of the correctness gate, chosen by a rule that looks at bf16 alone.

    python -m bench_ttfa.gate_inputs            # choose among all candidates and show them
    python -m bench_ttfa.gate_inputs --write    # ... and make them the gate's

A candidate is a held-out sentence said in a built-in voice. The lead of a greedy choice is its logit
minus the best of the others. A candidate's margin is the least lead of the semantic tokens of its
first NUM_FRAMES frames, also when the codes between them are chosen with NOISE on every logit, which
flips those that are near ties: they are the next frame's input. (NOISE is 0.2 logits, 6 % of their root
mean square.) The NUM_INPUTS candidates of the largest margin are the gate's inputs: 8 bits move logits
a little, and what the model is sure of must stay. Nothing is run in 8 bits: the model is its plain
PyTorch definition in fp32 on the CPU. Whoever trains the embedded model anew runs this with --write;
it takes about seven minutes of one core.

It is decoded with noise so often because chance has many ways: which near ties flip, and so what the
next frame reads, is drawn anew by any change of the last bits. Inputs that 35 decodes left with a margin
of 0.4 said other tokens in 3 of 20 runs in 8 bits whose embeddings differed by 1e-6 (in 6 with 8-bit
keys and values); those that 235 decodes leave with margins of 0.09 and more, in none of these 40.

The leads of the residual codes are shown beside the margin and choose nothing: the least of all decodes
of an input is below 0.1 logits whatever the input, which is less than what a single product in 8 bits
moves them by. The gate judges them one by one (see `bench_ttfa.gate_quantised`).
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from model.dual_ar import DualAR
from model.embedded import embedded_path
from model.loader import load_dual_ar
from model.prompt import Voice
from model.sampling import SamplingParams
from model.speech_model import SpeechModel, load_speech_model
from ops import reference

NUM_FRAMES = 5
NUM_INPUTS = 10
NOISE = 0.2  # logits, standard deviation
# (decodes with noise, how many candidates of each voice are then left, by their margin so far): few
# decodes of all, many of the best.
ROUNDS = ((3, 40), (8, 24), (24, 24), (200, 24))
INPUTS_PATH = Path(__file__).parent / "baselines" / "gate-inputs.json"
_BATCH = 50
_GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True, slots=True)
class GateInput:
    """A voice and what it says; least leads in logits."""

    voice: str
    text: str
    margin: float  # of the semantic tokens, noise or not
    plain_margin: float  # without noise
    residual_margin: float  # of the codes behind the first, without noise


def read_inputs(path: Path = INPUTS_PATH) -> list[GateInput]:
    """The gate's inputs, as they were written."""
    recorded = json.loads(path.read_text("utf-8"))
    return [GateInput(**each) for each in recorded["inputs"]]


def are_of_these_weights(path: Path = INPUTS_PATH) -> bool:
    """Whether the inputs were chosen with the embedded weights as they are."""
    recorded: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return bool(recorded["weights"] == weights_digest())


def weights_digest() -> str:
    data = (embedded_path() / "dual_ar.safetensors").read_bytes()
    return hashlib.sha256(data).hexdigest()[:12]


def prompts_of(inputs: Iterable[GateInput]) -> list[Tensor]:
    """i32 [1+K, T] each: voice and text as the server makes them."""
    model = load_speech_model(embedded_path(), device="cpu")
    prefixes: dict[str, Tensor] = {}
    prompts = []
    for each in inputs:
        if each.voice not in prefixes:
            prefixes[each.voice] = _prefix(model, each.voice)
        prompts.append(torch.cat([prefixes[each.voice], _turn(model, each.text)], dim=1))
    return prompts


def heldout_sentences() -> list[str]:
    path = embedded_path() / "recipe" / "heldout.txt"
    lines = path.read_text("utf-8").splitlines()
    return [line.split(" | ")[1].strip() for line in lines if line and not line.startswith("#")]


@torch.inference_mode()
def candidates(sentences: Sequence[str]) -> Iterator[list[GateInput]]:
    """Those that all rounds leave, a voice at a time."""
    model = load_speech_model(embedded_path(), device="cpu", dtype=torch.float32)
    turns = [_turn(model, text) for text in sentences]
    generator = torch.Generator().manual_seed(0)
    for path in sorted((model.path / "voices").glob("*.safetensors")):
        prefix = _prefix(model, path.stem)
        left = [
            (text, torch.cat([prefix, turn], dim=1))
            for text, turn in zip(sentences, turns, strict=True)
        ]
        for num_noisy, most in ROUNDS:
            parts = [left[i : i + _BATCH] for i in range(0, len(left), _BATCH)]
            judged = [
                each
                for part in parts
                for each in _judge(model.dual_ar, path.stem, part, num_noisy, generator)
            ]
            kept = {each.text for each in choose(judged, most)}
            left = [(text, prompt) for text, prompt in left if text in kept]
        yield choose(judged, most)


def choose(inputs: Iterable[GateInput], count: int = NUM_INPUTS) -> list[GateInput]:
    """Those of the largest margin."""
    return sorted(inputs, key=lambda each: -each.margin)[:count]


@torch.inference_mode()
def leads_of(prompts: Sequence[Tensor], frames: Tensor) -> Tensor:
    """Leads of the choices in given frames, as the plain model sees them.

    Args:
        prompts: i32 [1+K, T] each.
        frames: i32 [N, F, 1+K], token and codes.

    Returns:
        f32 [N, F, K]. Negative: the plain model would have chosen otherwise.
    """
    model = load_speech_model(embedded_path(), device="cpu", dtype=torch.float32).dual_ar
    return Greedy(model, prompts).decode(forced=frames).leads


@dataclass(frozen=True, slots=True)
class Choices:
    """What was chosen, and by how much."""

    frames: Tensor  # i32 [N, F, 1+K]: token, codes
    leads: Tensor  # f32 [N, F, K]: of the semantic token, of the codes behind the first


class Greedy:
    """Prompts prefilled on a plain model, to be decoded from there again and again."""

    def __init__(self, model: DualAR, prompts: Sequence[Tensor]) -> None:
        """`prompts`: i32 [1+K, T] each."""
        self._model = model
        self._prompts = prompts
        longest = max(prompt.shape[1] for prompt in prompts)
        self._cache = model.new_cache(len(prompts), longest + NUM_FRAMES)
        self._state = model.new_frame_state(len(prompts))
        for slot, prompt in enumerate(prompts):
            model.prefill(prompt[:, :-1], self._cache, slot, 0)

    def decode(self, forced: Tensor | None = None, noise: torch.Generator | None = None) -> Choices:
        """The first frames.

        Args:
            forced: i32 [N, F, 1+n], the token and the first n codes to take, whatever is best.
            noise: what flips near ties of the codes that are not forced.
        """
        model, state, num_slots = self._model, self._state, len(self._prompts)
        for slot, prompt in enumerate(self._prompts):
            model.join(state, slot, prompt[:, -1], prompt.shape[1] - 1, _GREEDY)
        slots, frames, leads = torch.arange(num_slots), [], []
        for frame in range(NUM_FRAMES):
            taken = state.rows[:num_slots, :0] if forced is None else forced[:, frame]
            with _Watch(model, taken[:, 1:].long(), noise) as watch:
                model.decode_frame(state, slots, self._cache)
            state.rows[:num_slots, : taken.shape[1]] = taken
            frames.append(state.rows[:num_slots].clone())
            leads.append(torch.stack(watch.leads, dim=1))
        return Choices(torch.stack(frames, 1), torch.stack(leads, 1))


class _Watch:
    """While it is entered, a model's frame is chosen here, and the leads of its choices are kept."""

    def __init__(self, model: DualAR, forced: Tensor, noise: torch.Generator | None) -> None:
        """`forced`: i64 [B, n], the first codes of the frame."""
        self._model = model
        self._forced = forced
        self._noise = noise
        self.leads: list[Tensor] = []  # f32 [B] each

    def __enter__(self) -> "_Watch":
        self._hook = self._model.fast.register_forward_pre_hook(self._before_fast)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _before_fast(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The fast AR asks its sampler for every residual code: from here on this object."""
        hidden, _, _, cache = args
        logits = reference.linear(hidden, self._model.restricted_head, None).float()
        return hidden, self.codebook(logits, 0), self, cache

    def codebook(self, logits: Tensor, codebook: int) -> Tensor:
        """i64 [B], the choice."""
        if codebook < self._forced.shape[1]:
            choice = self._forced[:, codebook]
        elif self._noise is None:
            choice = logits.argmax(-1)
        else:
            noise = torch.randn(logits.shape, generator=self._noise)
            choice = (logits + NOISE * noise).argmax(-1)
        others = logits.scatter(-1, choice[:, None], -torch.inf).amax(-1)
        self.leads.append(logits.gather(-1, choice[:, None]).squeeze(-1) - others)
        return choice


@dataclass(frozen=True, slots=True)
class Rounding:
    """What bf16 arithmetic alone changes: the plain model in bf16 against it in fp32, on a CPU."""

    tokens_equal: float  # semantic tokens, each its own codes
    codes_equal: float
    num_whole: int  # inputs all of whose codes are equal

    def __str__(self) -> str:
        return (
            f"bf16 arithmetic against fp32, nothing in 8 bits: {self.tokens_equal:.1%} of semantic "
            f"tokens and {self.codes_equal:.1%} of all codes equal, all codes of {self.num_whole} inputs"
        )


@torch.inference_mode()
def rounding_of_bf16(prompts: Sequence[Tensor]) -> Rounding:
    """`prompts`: i32 [1+K, T] each, of the embedded model."""
    exact, rounded = (
        Greedy(load_dual_ar(embedded_path(), "cpu", dtype), prompts).decode().frames
        for dtype in (torch.float32, torch.bfloat16)
    )
    same = exact == rounded
    return Rounding(
        tokens_equal=float(same[..., 0].float().mean()),
        codes_equal=float(same[..., 1:].float().mean()),
        num_whole=int(same.flatten(1).all(1).sum()),
    )


def _judge(
    model: DualAR,
    voice: str,
    prompts: Sequence[tuple[str, Tensor]],
    num_noisy: int,
    noise: torch.Generator,
) -> list[GateInput]:
    """Sentences and their prompts in one voice, with margins over so many decodes with noise."""
    greedy = Greedy(model, [prompt for _, prompt in prompts])
    plain = greedy.decode()
    tokens = plain.frames[..., :2]  # and codebook 0, which is the same
    noisy = [greedy.decode(tokens, noise).leads[..., 0].amin(1) for _ in range(num_noisy)]
    least = plain.leads.amin(1)
    margins = torch.stack([least[:, 0], *noisy]).amin(0)
    return [
        GateInput(
            voice=voice,
            text=text,
            margin=round(float(margins[i]), 3),
            plain_margin=round(float(least[i, 0]), 3),
            residual_margin=round(float(least[i, 1:].min()), 3),
        )
        for i, (text, _) in enumerate(prompts)
    ]


def _prefix(model: SpeechModel, name: str) -> Tensor:
    folder = model.path / "voices"
    codes = load_file(folder / f"{name}.safetensors")["codes"].to(torch.int32)
    spoken = json.loads((folder / f"{name}.json").read_text("utf-8"))["text"]
    return model.prompt.prefix([Voice(name, model.front_end(spoken).phonemes, codes)], "")


def _turn(model: SpeechModel, text: str) -> Tensor:
    user = model.prompt.user_text(model.front_end(text).phonemes)
    return torch.cat([user, model.prompt.assistant_header()], dim=1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench_ttfa.gate_inputs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help=f"into {INPUTS_PATH.name}")
    args = parser.parse_args(argv)
    found: list[GateInput] = []
    for of_voice in candidates(heldout_sentences()):
        found += of_voice
        print(f"{len(found)} candidates", file=sys.stderr)
    chosen = choose(found)
    print("margin (without noise; of residual codes)")
    for each in chosen:
        margins = f"{each.margin:6.3f} ({each.plain_margin:.3f}; {each.residual_margin:.3f})"
        print(f"{margins}  {each.voice:12} {each.text}")
    if args.write:
        rule = f"the {NUM_INPUTS} held-out sentences and voices of the largest margin in bf16"
        recorded = {"rule": rule, "num_frames": NUM_FRAMES, "weights": weights_digest()}
        recorded["inputs"] = [asdict(each) for each in chosen]
        INPUTS_PATH.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
        print(f"written: {INPUTS_PATH}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
