"""The embedded model's folder: a complete checkpoint with voices in the documented schema."""

import json

import pytest
import torch
from safetensors.torch import load_file

from model.embedded import embedded_path
from model.embedded.recipe import export
from model.embedded.recipe.tokens import SEMANTIC_START, SPECIAL, build_vocab, tokenizer_json
from model.embedded.recipe.trainable import DualARConfig
from model.prompt import load_tokenizer
from model.speech_model import read_serving
from model.text import EnglishFrontEnd

CONFIG = json.loads((embedded_path() / "config.json").read_text("utf-8"))
VOICES = sorted(path.stem for path in (embedded_path() / "voices").glob("*.json"))


def test_how_it_is_served() -> None:
    serving = read_serving(CONFIG)
    assert serving.front_end == "english_phonemes"
    assert serving.context == "prefix"
    assert serving.default_voice in VOICES
    assert serving.max_segment_chars == 190


def test_there_are_six_voices() -> None:
    assert len(VOICES) >= 6


def test_the_recipe_writes_this_folder() -> None:
    """Config and tokenizer are what `export` makes for this codec and this alphabet."""
    tokenizer = json.loads((embedded_path() / "tokenizer.json").read_text("utf-8"))
    ids = tokenizer["model"]["vocab"]
    vocab = build_vocab([token for token, i in ids.items() if len(SPECIAL) < i < SEMANTIC_START])
    assert tokenizer_json(vocab) == tokenizer
    for name in ("config.json", "tokenizer.json"):  # so that an export leaves no difference
        assert (embedded_path() / name).read_text("utf-8").endswith("}\n")
    codec = CONFIG["codec_config"]
    made = export.model_config(DualARConfig(), codec, vocab, "prefix", "af_heart")
    assert made == CONFIG


@pytest.mark.parametrize("name", VOICES)
def test_voice(name: str) -> None:
    folder = embedded_path() / "voices"
    description = json.loads((folder / f"{name}.json").read_text("utf-8"))
    codes = load_file(folder / f"{name}.safetensors")["codes"]
    config = CONFIG["audio_decoder_config"]
    assert description["name"] == name
    assert description["frames"] == codes.shape[1]
    assert codes.dtype == torch.int32
    assert codes.shape[0] == config["num_codebooks"]
    assert 2 * 25 <= codes.shape[1] <= 8 * 25
    assert 0 <= int(codes.min()) <= int(codes.max()) < config["vocab_size"]
    spoken = EnglishFrontEnd()(description["text"])
    assert spoken.phonemes
    assert spoken.warnings == ()


def test_phonemes_are_one_known_token_each() -> None:
    tokenizer = load_tokenizer(embedded_path())
    unknown = tokenizer.token_to_id("<|unk|>")
    spoken = EnglishFrontEnd()('The FBI paid $29.50 (twice), "really"; 3 p.m.: yes! No?')
    ids = tokenizer.encode(spoken.phonemes, add_special_tokens=False).ids
    assert len(ids) == len(spoken.phonemes)
    assert unknown not in ids


def test_licence_and_card_are_there() -> None:
    for name in ("MODEL_CARD.md", "NOTICE.txt", "LICENSE.txt"):
        assert (embedded_path() / name).read_text("utf-8").strip()
