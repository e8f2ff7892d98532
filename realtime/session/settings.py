"""What `session.start` and `session.update` settle, with the model's defaults filled in."""

from collections.abc import Callable
from dataclasses import dataclass

from realtime.pingpong.api import EngineInfo
from realtime.pingpong.messages import OpenSlot, SamplingParams, SlotRef, VoicePrompt
from realtime.session.limits import SessionLimits
from realtime.wire import Sampling, SessionStart, SessionUpdate


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """What a turn is spoken with. Compare with `is_same`: a voice is its object, not its name."""

    voice: VoicePrompt
    prompt: str
    sampling: Sampling
    max_lead_ms: int

    def is_same(self, other: "Settings") -> bool:
        is_same_way = self.sampling == other.sampling and self.max_lead_ms == other.max_lead_ms
        return is_same_way and self.is_same_dialogue(other)

    def is_same_dialogue(self, other: "Settings") -> bool:
        """What the model remembers under the one stays under the other."""
        return self.voice is other.voice and self.prompt == other.prompt

    def open_slot(self, slot: SlotRef, info: EngineInfo, fresh_seed: int) -> OpenSlot:
        """The command that prefills them; `fresh_seed` is used where the client gave none."""
        return OpenSlot(
            slot=slot,
            voices=(self.voice,),
            prompt=self.prompt,
            sampling=_resolve(self.sampling, info, fresh_seed),
            max_lead_ms=self.max_lead_ms,
        )


class SettingsResolver:
    """Reads what the client asks for. Both methods raise what `find_voice` raises."""

    def __init__(
        self, info: EngineInfo, limits: SessionLimits, find_voice: Callable[[str], VoicePrompt]
    ) -> None:
        self._info = info
        self._limits = limits
        self._find_voice = find_voice

    def start(self, message: SessionStart) -> Settings:
        return Settings(
            voice=self._find_voice(message.voice or self._info.default_voice),
            prompt=message.prompt if self._info.has_prompt else "",
            sampling=message.sampling,
            max_lead_ms=self._lead_ms(message.max_lead_ms, self._limits.max_lead_ms),
        )

    def update(self, old: Settings, message: SessionUpdate) -> Settings:
        has_new_prompt = message.prompt is not None and self._info.has_prompt
        return Settings(
            voice=old.voice if message.voice is None else self._find_voice(message.voice),
            prompt=message.prompt or "" if has_new_prompt else old.prompt,
            sampling=message.sampling or old.sampling,
            max_lead_ms=self._lead_ms(message.max_lead_ms, old.max_lead_ms),
        )

    def _lead_ms(self, lead_ms: int | None, default_ms: int) -> int:
        return min(default_ms if lead_ms is None else lead_ms, self._limits.max_lead_cap_ms)


def _resolve(sampling: Sampling, info: EngineInfo, fresh_seed: int) -> SamplingParams:
    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return SamplingParams(
        temperature=given(sampling.temperature, info.default_temperature),
        top_p=given(sampling.top_p, info.default_top_p),
        top_k=info.default_top_k if sampling.top_k is None else sampling.top_k,
        seed=fresh_seed if sampling.seed is None else sampling.seed,
    )
