"""The embedded model's vocabulary: one token per phoneme or ASCII character, one per fixed string of the prompt."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SPECIAL = (
    "<|endoftext|>",
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|phoneme_start|>",
    "<|phoneme_end|>",
    "<|text|>",
    "<|voice|>",
    "<|interleave|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<|unk|>",
    "system\n",
    "user\n",
    "assistant\n",
    "convert the provided text to speech reference to the following:\n\nText:\n",
    "convert the provided text to speech",
    "\n\nSpeech:\n",
    "<|speaker:0|>",
    "<|speaker:1|>",
    "<|speaker:2|>",
    "<|speaker:3|>",
)
SEMANTIC_START = 256
CODEBOOK_SIZE = 1024
VOCAB_SIZE = SEMANTIC_START + CODEBOOK_SIZE


def read_phonemes(path: Path) -> list[str]:
    """The teacher's alphabet, in the order of its vocab.json (phoneme -> token id)."""
    return list(json.loads(path.read_text(encoding="utf-8")))


def build_vocab(phonemes: Sequence[str]) -> dict[str, int]:
    vocab = {token: i for i, token in enumerate(SPECIAL)}
    for char in ["\n", *phonemes, *map(chr, range(32, 127))]:
        vocab.setdefault(char, len(vocab))
    if len(vocab) > SEMANTIC_START:
        raise ValueError(f"{len(vocab)} text tokens do not fit below {SEMANTIC_START}")
    for code in range(CODEBOOK_SIZE):
        vocab[f"<|semantic:{code}|>"] = SEMANTIC_START + code
    return vocab


def tokenizer_json(vocab: dict[str, int]) -> dict[str, Any]:
    """A `tokenizers` file: fixed strings are added tokens, the rest is split into characters."""
    added = {t: i for t, i in vocab.items() if t in SPECIAL or i >= SEMANTIC_START}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags, "special": True} for token, i in added.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "[\\s\\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<|unk|>"},
    }


class PromptTokens:
    """Token ids of the prompt's pieces; semantic positions are left as `CODE`."""

    CODE = -1

    def __init__(self, vocab: dict[str, int]) -> None:
        self.vocab, self.im_end = vocab, vocab["<|im_end|>"]

    def characters(self, phonemes: str) -> list[int]:
        return [self.vocab.get(char, self.vocab["<|unk|>"]) for char in phonemes]

    def ids(self, *tokens: str) -> list[int]:
        return [self.vocab[token] for token in tokens]

    def system(self, phonemes: str | None, num_frames: int) -> list[int]:
        """The speaker's reference, or none."""
        if phonemes is None:
            return self.ids(
                "<|im_start|>",
                "system\n",
                "convert the provided text to speech",
                "<|im_end|>",
                "\n",
            )
        return [
            *self.ids("<|im_start|>", "system\n", SPECIAL[16], "<|speaker:0|>"),
            *self.characters(phonemes),
            *self.ids("\n\nSpeech:\n"),
            *[self.CODE] * num_frames,
            *self.ids("<|im_end|>", "\n"),
        ]

    def user(self, phonemes: str) -> list[int]:
        """A turn up to the point where speech begins."""
        return [
            *self.ids("<|im_start|>", "user\n"),
            *self.characters(phonemes),
            *self.ids("<|im_end|>", "\n", "<|im_start|>", "assistant\n", "<|voice|>"),
        ]

    def turn(self, phonemes: str, num_frames: int) -> list[int]:
        return [
            *self.user(phonemes),
            *[self.CODE] * num_frames,
            *self.ids("<|im_end|>", "\n"),
        ]
