"""The models of the correctness gate, and what they say: in bf16, and in 8 bits after that."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor

from bench_ttfa.gate_inputs import (
    NUM_FRAMES,
    GateInput,
    Rounding,
    prompts_of,
    read_inputs,
    rounding_of_bf16,
)
from bench_ttfa.widened import s2_pro_shapes, widened
from model.config import DualARConfig
from model.dual_ar import DualAR
from model.embedded import embedded_path
from model.errors import ConfigError
from model.kv_cache import KvFormat
from model.loader import load_dual_ar
from model.random_model import RandomModel, is_random
from model.sampling import SamplingParams
from ops.quantize import Kind

EMBEDDED = "embedded"
WIDENED = "embedded:s2-pro"
NUM_RANDOM_INPUTS = 12
RANDOM_POSITIONS = 96


@dataclass(frozen=True, slots=True)
class Decoded:
    """Greedy frames of all inputs in one format."""

    frames: Tensor  # i32 [N, F, 1+K]: token, codes
    logits: Tensor  # f32 [N, F, n+1], of the semantic ids and the end

    @classmethod
    def cat(cls, parts: Sequence[Decoded]) -> Decoded:
        frames, logits = zip(*((part.frames, part.logits) for part in parts), strict=True)
        return cls(torch.cat(frames), torch.cat(logits))

    @property
    def margins(self) -> Tensor:
        """f32 [N, F], best logit minus the next."""
        best, second = self.logits.topk(2).values.unbind(-1)
        return best - second


@dataclass(frozen=True, slots=True)
class Said:
    """What a model says in bf16."""

    inputs: list[GateInput]  # of each stream; none: random weights
    prompts: list[Tensor]  # i32 [1+K, T]
    decoded: Decoded
    streams: int  # decoded at once
    rounding: Rounding | None  # None: random weights

    def again(self, model: DualAR, kv_format: KvFormat) -> tuple[Decoded, Decoded]:
        """What another one says, reading its own codes, and reading those of this one."""
        free, forced = [], []
        for start in range(0, len(self.prompts), self.streams):
            part = slice(start, start + self.streams)
            prefilled = Prefilled(model, self.prompts[part], kv_format)
            free.append(prefilled.decode())
            forced.append(prefilled.decode(self.decoded.frames[part]))
        return Decoded.cat(free), Decoded.cat(forced)


@torch.inference_mode()
def said_in_bf16(name: str, device: torch.device, streams: int | None = None) -> Said:
    """
    Args:
        streams: decoded at once, of which some say the same if there are more than inputs; None:
            as many as inputs.
    """
    inputs = [] if is_random(name) else read_inputs()
    model = load(name, "bf16", device)
    distinct = prompts_of(inputs) if inputs else _random_prompts(model.config)
    size = streams or len(distinct)
    count = max(size, len(distinct))
    prompts = list(islice(cycle(distinct), count))
    parts = [prompts[i : i + size] for i in range(0, count, size)]
    return Said(
        inputs=list(islice(cycle(inputs), count)),
        prompts=prompts,
        decoded=Decoded.cat([Prefilled(model, part).decode() for part in parts]),
        streams=size,
        rounding=rounding_of_bf16(distinct) if inputs else None,
    )


def load(name: str, kind: Kind, device: torch.device) -> DualAR:
    """On a CPU the ops are their definitions, and what is not 8 bits is fp32."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if is_random(name):
        model = RandomModel.parse(name).dual_ar(device, dtype)
    elif name == WIDENED:
        model = widened(s2_pro_shapes(), device, dtype)
    else:
        model = load_dual_ar(embedded_path(), device, dtype)
    model.use_kernels(kind)
    return model


class Prefilled:
    """A model with prompts prefilled, to be decoded from there again and again."""

    def __init__(
        self, model: DualAR, prompts: Sequence[Tensor], kv_format: KvFormat = "bf16"
    ) -> None:
        """`prompts`: i32 [1+K, T] each (host)."""
        self._model = model
        self._prompts = [prompt.to(model.device) for prompt in prompts]
        max_len = max(prompt.shape[1] for prompt in prompts) + NUM_FRAMES
        self._cache = model.new_cache(len(prompts), max_len, kv_format=kv_format)
        self._state = model.new_frame_state(len(prompts))
        for slot, prompt in enumerate(self._prompts):
            model.prefill(prompt[:, :-1], self._cache, slot, 0)

    def decode(self, forced: Tensor | None = None) -> Decoded:
        """Greedy frames of all prompts in one batch.

        Args:
            forced: i32 [N, F, 1+K], what every next frame reads in place of the one made.
        """
        model, state, num_slots = self._model, self._state, len(self._prompts)
        for slot, prompt in enumerate(self._prompts):
            position = prompt.shape[1] - 1
            model.join(state, slot, prompt[:, -1], position, SamplingParams(temperature=0))
        slots = torch.arange(num_slots, device=model.device)
        frames, logits = [], []
        for frame in range(NUM_FRAMES):
            logits.append(model.next_logits(state, slots, self._cache).cpu())
            model.decode_frame(state, slots, self._cache)
            frames.append(state.rows[:num_slots].to("cpu", copy=True))
            if forced is not None:
                state.rows[:num_slots] = forced[:, frame].to(model.device)
        return Decoded(torch.stack(frames, 1), torch.stack(logits, 1))


def _random_prompts(config: DualARConfig) -> list[Tensor]:
    begin, generator = config.semantic_begin_id, torch.Generator().manual_seed(0)
    assert begin is not None, config
    shape = (NUM_RANDOM_INPUTS, 1 + config.num_codebooks, RANDOM_POSITIONS)
    rows = torch.randint(0, config.num_semantic, shape, generator=generator, dtype=torch.int32)
    rows[:, 0] = rows[:, 1] + begin
    return list(rows)


def model_name(text: str) -> str:
    """A type of options."""
    try:
        if is_random(text):
            RandomModel.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not is_random(text) and text not in (EMBEDDED, WIDENED):
        known = f"{EMBEDDED}, {WIDENED}, random:..."
        raise argparse.ArgumentTypeError(f"{text!r} is none of {known}")
    return text
