r"""Text and voices -> prompt rows, in the layout the models were trained on, byte for byte.

    <|im_start|>system\n
    convert the provided text to speech reference to the following:\n\nText:\n
    <|speaker:0|>TEXT OF VOICE 0\n<|speaker:1|>TEXT OF VOICE 1
    \n\nSpeech:\n
    CODES OF ALL VOICES
    <|im_end|>\n
    <|im_start|>user\n
    TARGET TEXT
    <|im_end|>\n
    <|im_start|>assistant\n<|voice|>

Each line above is one piece, tokenised by itself. Without a voice the system message is the one
piece `convert the provided text to speech`.

What people type can never become a control token. User text goes through a second tokenizer that
reads special tokens as the characters they are made of, so `<|im_end|>` in a text is eight or so
ordinary tokens. Speaker tags `<|speaker:N|>` keep their meaning: a tokenizer that has them as
tokens gets them as tokens, to any other they are ordinary text anyway. Emotion tags like `[laugh]`
are ordinary text everywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from model.config import DualARConfig
from model.errors import PromptError

_SPEAKER_TAG = re.compile(r"(<\|speaker:\d+\|>)")


@dataclass(frozen=True, slots=True, eq=False)  # tensors have no single truth value
class Voice:
    """A speaker reference."""

    name: str
    text: str  # what the reference says, in the form the model reads; speaker tags are optional
    codes: Tensor = field(repr=False)  # integer [K, T] (host)


def load_tokenizer(path: Path) -> Tokenizer:
    """Read tokenizer.json of a checkpoint directory.

    Raises:
        PromptError: if it is missing or is not a tokenizer.
    """
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        raise PromptError(f"{file}: missing; expected the tokenizer of the checkpoint")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise PromptError(f"{file}: is not a tokenizer ({error}); download it again") from error


class PromptBuilder:
    """Builds prompt rows i32 [1+K, T] (host): token ids, then codes (zero where text)."""

    def __init__(self, tokenizer: Tokenizer, config: DualARConfig) -> None:
        """Check that tokenizer and model mean the same ids.

        Raises:
            PromptError: if the tokenizer lacks a control token or disagrees with the config.
        """
        self._control = tokenizer
        self._plain = _without_control_tokens(tokenizer)
        self._config = config
        last = f"<|semantic:{config.num_semantic - 1}|>"
        self._semantic_begin_id = self._expect_id("<|semantic:0|>", config.semantic_begin_id)
        self._expect_id(last, config.semantic_end_id)
        self._expect_id("<|im_end|>", config.end_id)
        for name in ("<|im_start|>", "<|voice|>"):
            self._expect_id(name, None)
        self._assistant_header = self._pieces("<|im_end|>\n", "<|im_start|>assistant\n<|voice|>")
        self._next_turn = self._pieces("<|im_end|>\n", "<|im_start|>user\n")

    def prefix(self, voices: Sequence[Voice], instruction: str = "") -> Tensor:
        """Everything up to the target text. It is the same for all texts, so its KV can be kept.

        Args:
            voices: speaker references, speaker 0 first; may be empty.
            instruction: how to speak; goes on a line of its own in front of the fixed sentence.
                Only models that were trained with instructions follow it.

        Raises:
            PromptError: if the codes of a voice do not fit the model, or a text is not valid.
        """
        rows = [self._pieces("<|im_start|>system\n")]
        if instruction:
            rows.append(self.user_text(instruction + "\n"))
        if voices:
            rows += [
                self._pieces(
                    "convert the provided text to speech reference to the following:\n\nText:\n"
                ),
                self.user_text("\n".join(_tagged(i, voice.text) for i, voice in enumerate(voices))),
                self._pieces("\n\nSpeech:\n"),
                *(self._speech(voice) for voice in voices),
            ]
        else:
            rows.append(self._pieces("convert the provided text to speech"))
        return torch.cat([*rows, self._next_turn], dim=1)

    def user_text(self, text: str) -> Tensor:
        """The target text as given; see the module for what control tokens in it become.

        Raises:
            PromptError: if the text is not valid Unicode.
        """
        ids: list[int] = []
        for part in self._split(text):
            is_tag = _SPEAKER_TAG.fullmatch(part) is not None
            ids += self._encode(self._control if is_tag else self._plain, part)
        return self._text_rows(ids)

    def assistant_header(self) -> Tensor:
        """Closes the target text and opens the speech; the model goes on from its last row."""
        return self._assistant_header.clone()

    def next_turn(self) -> Tensor:
        """Closes generated speech and opens the next target text."""
        return self._next_turn.clone()

    def _split(self, text: str) -> list[str]:
        """Cut out the speaker tags that are tokens. Others stay inside: cutting text changes how a
        byte-pair tokenizer sees its borders."""
        parts: list[str] = [""]
        for part in _SPEAKER_TAG.split(text):
            is_tag = _SPEAKER_TAG.fullmatch(part) is not None
            if is_tag and self._control.token_to_id(part) is not None:
                parts += [part, ""]
            else:
                parts[-1] += part
        return [part for part in parts if part]

    def _pieces(self, *pieces: str) -> Tensor:
        return self._text_rows([i for piece in pieces for i in self._encode(self._control, piece)])

    def _encode(self, tokenizer: Tokenizer, text: str) -> list[int]:
        try:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)
        except (UnicodeError, TypeError) as error:  # lone surrogates
            raise PromptError(
                f"text: got {text[:40]!r}, expected valid Unicode without lone surrogates"
            ) from error

    def _text_rows(self, ids: list[int]) -> Tensor:
        rows = torch.zeros(1 + self._config.num_codebooks, len(ids), dtype=torch.int32)
        rows[0] = torch.tensor(ids, dtype=torch.int32)
        return rows

    def _speech(self, voice: Voice) -> Tensor:
        codes, num_codebooks = voice.codes, self._config.num_codebooks
        if codes.ndim != 2 or codes.shape[0] != num_codebooks or codes.is_floating_point():
            raise PromptError(
                f"voice {voice.name!r}: got codes {codes.dtype} {list(codes.shape)}, expected "
                f"integers [{num_codebooks}, T]; encode it with this model's codec"
            )
        codes = codes.to("cpu", torch.int32)
        low, high = (int(codes.min()), int(codes.max())) if codes.numel() else (0, 0)
        if low < 0 or high >= self._config.codebook_size or self._has_no_token(codes[0]):
            raise PromptError(
                f"voice {voice.name!r}: got codes from {low} to {high}, expected 0 to "
                f"{self._config.codebook_size - 1}; encode it with this model's codec"
            )
        return torch.cat([codes[:1] + self._semantic_begin_id, codes])

    def _has_no_token(self, codes: Tensor) -> bool:
        return bool((codes >= self._config.num_semantic).any())

    def _expect_id(self, name: str, expected: int | None) -> int:
        got = self._control.token_to_id(name)
        if got is None or (expected is not None and got != expected):
            raise PromptError(
                f"tokenizer: got {got} for {name}, expected "
                f"{'an id' if expected is None else expected}; tokenizer.json and config.json "
                "must come from the same checkpoint"
            )
        return int(got)


def _without_control_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """A twin that reads every added token as text; the setting is one of the whole tokenizer, and
    covers only tokens marked as special."""
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = True
    twin = Tokenizer.from_str(json.dumps(data))
    twin.encode_special_tokens = True
    return twin


def _tagged(index: int, text: str) -> str:
    return text if _SPEAKER_TAG.search(text) else f"<|speaker:{index}|>{text}"
