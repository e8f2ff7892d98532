"""Voices, prompts and texts as rows i32 [1+K, T] on the host: what is prefilled into a slot."""

from typing import NamedTuple

import torch
from torch import Tensor

from model.errors import PromptError
from model.prompt import Voice
from model.speech_model import SpeechModel
from realtime.pingpong.messages import VoicePrompt

MIN_TEXT_POSITIONS = 64  # of a segment, besides its frames


class SegmentRows(NamedTuple):
    rows: Tensor
    num_needed: int  # positions with the assistant header
    room: int  # positions there are; the text was cut if more are needed


class PromptRows:
    """Callable on any thread."""

    def __init__(self, model: SpeechModel, max_positions: int) -> None:
        self._model = model
        self._max_positions = max_positions
        self.num_lead = model.prompt.next_turn().shape[1]  # what parts an exchange from the last

    def prefix(self, voices: tuple[VoicePrompt, ...], prompt: str) -> Tensor:
        """Rows of the speaker reference and prompt.

        Raises:
            PromptError: they leave no room for a text, or do not fit the model's prompt format.
        """
        rows = prefix_rows(self._model, voices, prompt)
        room = self.room_after(MIN_TEXT_POSITIONS)
        if rows.shape[1] > room:
            raise PromptError(
                f"voice and prompt need {rows.shape[1]} positions, there is room for {room}; "
                "use a shorter reference clip, reference text or prompt"
            )
        return rows

    def room_after(self, context_length: int) -> int:
        """Positions for a text after the context, and besides the frames that answer it."""
        return self._max_positions - context_length - self._model.serving.max_frames

    def segment(
        self, phonemes: str, context_length: int, *, is_first: bool, is_closed: bool
    ) -> SegmentRows:
        """Rows of a segment after a context; the end of the text is cut if it does not fit."""
        prompt = self._model.prompt
        lead = [] if is_first else [prompt.next_turn()]
        text, header = prompt.user_text(phonemes), prompt.assistant_header()
        room = self.room_after(context_length)
        num_needed = sum(part.shape[1] for part in [*lead, text, header])
        if num_needed > room:
            text = text[:, : max(1, text.shape[1] - (num_needed - room))]
        rows = torch.cat([*lead, text, *([header] if is_closed else [])], dim=1)
        return SegmentRows(rows, num_needed, room)


def prefix_rows(model: SpeechModel, voices: tuple[VoicePrompt, ...], prompt: str) -> Tensor:
    spoken = [
        Voice(voice.name, model.front_end(voice.text).phonemes, torch.from_numpy(voice.codes))
        for voice in voices
        if voice.codes.shape[1]
    ]
    return model.prompt.prefix(spoken, prompt if model.serving.has_prompt else "")


def num_common(old: Tensor, new: Tensor) -> int:
    """How many of the first rows are the same."""
    num_shared = min(old.shape[1], new.shape[1])
    equal = (old[:, :num_shared] == new[:, :num_shared]).all(dim=0)
    return int(equal.to(torch.int32).cumprod(0).sum())
