"""What `session.start` and `session.update` settle, with the model's defaults filled in."""

from dataclasses import dataclass

from realtime.pingpong.api import EngineInfo
from realtime.pingpong.messages import OpenSlot, SamplingParams, SlotRef, VoicePrompt
from realtime.wire import Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """What a turn is spoken with. Compare with `is_same`: a voice is its object, not its name."""

    voice: VoicePrompt
    prompt: str
    sampling: Sampling
    max_lead_ms: int

    def is_same(self, other: "Settings") -> bool:
        return (
            self.voice is other.voice
            and self.prompt == other.prompt
            and self.sampling == other.sampling
            and self.max_lead_ms == other.max_lead_ms
        )

    def open_slot(self, slot: SlotRef, info: EngineInfo, fresh_seed: int) -> OpenSlot:
        """The command that prefills them; `fresh_seed` is used where the client gave none."""
        return OpenSlot(
            slot=slot,
            voices=(self.voice,),
            prompt=self.prompt,
            sampling=_resolve(self.sampling, info, fresh_seed),
            max_lead_ms=self.max_lead_ms,
        )


def _resolve(sampling: Sampling, info: EngineInfo, fresh_seed: int) -> SamplingParams:
    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return SamplingParams(
        temperature=given(sampling.temperature, info.default_temperature),
        top_p=given(sampling.top_p, info.default_top_p),
        top_k=info.default_top_k if sampling.top_k is None else sampling.top_k,
        seed=fresh_seed if sampling.seed is None else sampling.seed,
    )
