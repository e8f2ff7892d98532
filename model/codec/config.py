"""Sizes of the modded DAC, from either of the two JSON schemas in use.

`nested`: the sizes of the quantiser under `quantizer`, of its transformers under
`quantizer.pre_post`. `flat`: everything at one level. Both become one `DacConfig`; an unknown
key is an error, so that no setting is silently ignored.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model.errors import ConfigError


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of one causal transformer with a limited attention window."""

    num_layers: int
    num_heads: int
    head_dim: int
    dim: int
    intermediate_dim: int
    window: int  # positions that a query sees, itself included
    rope_base: float
    norm_eps: float


@dataclass(frozen=True)
class DacConfig:
    """Sizes of the whole codec."""

    sample_rate: int
    encoder_dim: int
    encoder_rates: tuple[int, ...]
    decoder_dim: int
    decoder_rates: tuple[int, ...]
    latent_dim: int
    downsample_factors: tuple[int, ...]
    codebook_sizes: tuple[int, ...]  # the semantic codebook first
    codebook_dim: int
    convnext_multiple: int
    encoder_transformers: tuple[TransformerConfig | None, ...]  # after each encoder block
    pre: TransformerConfig
    post: TransformerConfig

    def __post_init__(self) -> None:
        hop, upsampling = math.prod(self.encoder_rates), math.prod(self.decoder_rates)
        if hop != upsampling:
            raise ConfigError(
                f"codec_config: encoder_rates multiply to {hop}, decoder_rates to {upsampling}; "
                "they must agree"
            )
        if len(self.encoder_transformers) != len(self.encoder_rates):
            raise ConfigError(
                f"codec_config: {len(self.encoder_transformers)} encoder_transformer_layers for "
                f"{len(self.encoder_rates)} encoder_rates; they must agree"
            )

    @property
    def frame_samples(self) -> int:
        """Samples per frame of codes."""
        return math.prod(self.encoder_rates) * math.prod(self.downsample_factors)

    @property
    def num_codebooks(self) -> int:
        """Codebooks per frame, the semantic one included."""
        return len(self.codebook_sizes)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> DacConfig:
        """Read either schema.

        Raises:
            ConfigError: naming the key that is missing, unknown or of the wrong type.
        """
        read = _read_nested if "quantizer" in raw else _read_flat
        return read(_Fields(raw, "codec_config"))

    @staticmethod
    def s2() -> DacConfig:
        """Sizes of the S2 codec, whose checkpoint carries no configuration of its own."""
        return DacConfig.from_json(_S2)


_S2: Mapping[str, Any] = {
    "sample_rate": 44100,
    "encoder_dim": 64,
    "encoder_rates": [2, 4, 8, 8],
    "decoder_dim": 1536,
    "decoder_rates": [8, 8, 4, 2],
    "encoder_transformer_layers": [0, 0, 0, 4],
    "decoder_transformer_layers": [4, 0, 0, 0],
    "transformer": {
        "head_dim": 64,
        "rope_base": 10000,
        "norm_eps": 1e-5,
        "encoder_window": 512,
        "intermediate_multiple": 3,
    },
    "quantizer": {
        "input_dim": 1024,
        "n_codebooks": 9,
        "codebook_size": 1024,
        "codebook_dim": 8,
        "downsample_factor": [2, 2],
        "semantic_codebook_size": 4096,
        "pre_post": {
            "n_layer": 8,
            "n_head": 16,
            "dim": 1024,
            "intermediate_size": 3072,
            "window_size": 128,
            "causal": True,
        },
    },
}

_UNUSED_LAYERS = "decoder_transformer_layers"
_MISSING = object()
_MAX_COUNT = 2**31 - 1
MAX_RATE_HZ = 192_000
_MAX_CODEBOOKS = 1024


class _Fields:
    """A JSON object whose fields are taken one by one, so that left-over ones are seen."""

    def __init__(self, raw: object, where: str) -> None:
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{where}: expected an object, found {type(raw).__name__}")
        self._left = dict(raw)
        self._where = where

    def _take(self, key: str, default: object) -> object:
        value = self._left.pop(key, default)
        if value is _MISSING:
            raise ConfigError(f"{self._where}.{key}: missing")
        return value

    def _bad(self, key: str, value: object, expected: str) -> ConfigError:
        return ConfigError(f"{self._where}.{key}: expected {expected}, found {value!r}")

    def count(self, key: str, default: object = _MISSING, most: int = _MAX_COUNT) -> int:
        value = self._take(key, default)
        if not _is_count(value):
            raise self._bad(key, value, "a positive integer")
        assert isinstance(value, int), value
        if value > most:
            raise self._bad(key, value, f"at most {most}")
        return value

    def number(self, key: str, default: object = _MISSING) -> float:
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self._bad(key, value, "a positive number")
        if value > sys.float_info.max:
            raise self._bad(key, value, "a finite number")
        return float(value)

    def counts(
        self, key: str, default: object = _MISSING, allowed: Callable[[object], bool] | None = None
    ) -> tuple[int, ...]:
        value = self._take(key, default)
        is_allowed = allowed or _is_count
        if not isinstance(value, list | tuple) or not value or not all(map(is_allowed, value)):
            raise self._bad(key, value, "a list of integers")
        return tuple(value)

    def fields(self, key: str) -> _Fields:
        return _Fields(self._take(key, _MISSING), f"{self._where}.{key}")

    def must_be(self, key: str, expected: object) -> None:
        value = self._take(key, expected)
        if value != expected:
            raise self._bad(key, value, repr(expected))

    def ignore(self, *keys: str) -> None:
        for key in keys:
            self._left.pop(key, None)

    def finish(self) -> None:
        if self._left:
            raise ConfigError(f"{self._where}: unknown keys {sorted(self._left)}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_count_or_zero(value: object) -> bool:
    return value == 0 or _is_count(value)


def _read_nested(top: _Fields) -> DacConfig:
    general, quantizer = top.fields("transformer"), top.fields("quantizer")
    pre_post = quantizer.fields("pre_post")
    head_dim, rope_base = general.count("head_dim"), general.number("rope_base")
    norm_eps, multiple = general.number("norm_eps"), general.count("intermediate_multiple")
    window = general.count("encoder_window")
    encoder_dim, latent_dim = top.count("encoder_dim"), quantizer.count("input_dim")
    layers = top.counts("encoder_transformer_layers", allowed=_is_count_or_zero)

    def encoder_transformer(block: int, num_layers: int) -> TransformerConfig | None:
        dim = encoder_dim * 2 ** (block + 1)
        heads = dim // head_dim
        return (
            TransformerConfig(
                num_layers, heads, head_dim, dim, dim * multiple, window, rope_base, norm_eps
            )
            if num_layers
            else None
        )

    transformer = TransformerConfig(
        num_layers=pre_post.count("n_layer"),
        num_heads=pre_post.count("n_head"),
        head_dim=head_dim,
        dim=pre_post.count("dim"),
        intermediate_dim=pre_post.count("intermediate_size"),
        window=pre_post.count("window_size"),
        rope_base=rope_base,
        norm_eps=norm_eps,
    )
    pre_post.must_be("causal", True)
    semantic, num_residual = (
        quantizer.count("semantic_codebook_size"),
        quantizer.count("n_codebooks", most=_MAX_CODEBOOKS),
    )
    config = DacConfig(
        sample_rate=top.count("sample_rate", most=MAX_RATE_HZ),
        encoder_dim=encoder_dim,
        encoder_rates=top.counts("encoder_rates"),
        decoder_dim=top.count("decoder_dim"),
        decoder_rates=top.counts("decoder_rates"),
        latent_dim=latent_dim,
        downsample_factors=quantizer.counts("downsample_factor"),
        codebook_sizes=(semantic, *[quantizer.count("codebook_size")] * num_residual),
        codebook_dim=quantizer.count("codebook_dim"),
        convnext_multiple=4,
        encoder_transformers=tuple(encoder_transformer(i, n) for i, n in enumerate(layers)),
        pre=transformer,
        post=transformer,
    )
    # The decoder's transformers are configured in published checkpoints but hold no weights.
    unused = top.counts(_UNUSED_LAYERS, [0] * len(config.decoder_rates), _is_count_or_zero)
    if len(unused) != len(config.decoder_rates):
        raise ConfigError(
            f"codec_config: {len(unused)} {_UNUSED_LAYERS} for {len(config.decoder_rates)} "
            "decoder_rates; they must agree"
        )
    top.ignore("type")
    for fields in (pre_post, quantizer, general, top):
        fields.finish()
    return config


def _read_flat(top: _Fields) -> DacConfig:
    latent_dim, encoder_rates = top.count("latent_dim"), top.counts("encoder_rates")
    num_heads, head_dim = top.count("tf_heads"), top.count("tf_head_dim")
    intermediate_dim, window = top.count("tf_inter"), top.count("window")
    rope_base, norm_eps = top.number("rope_base"), top.number("norm_eps")

    def transformer(num_layers: int) -> TransformerConfig:
        return TransformerConfig(
            num_layers,
            num_heads,
            head_dim,
            latent_dim,
            intermediate_dim,
            window,
            rope_base,
            norm_eps,
        )

    semantic, num_residual = (
        top.count("semantic_codebook_size"),
        top.count("n_codebooks", most=_MAX_CODEBOOKS),
    )
    config = DacConfig(
        sample_rate=top.count("sample_rate", most=MAX_RATE_HZ),
        encoder_dim=top.count("encoder_dim"),
        encoder_rates=encoder_rates,
        decoder_dim=top.count("decoder_dim"),
        decoder_rates=top.counts("decoder_rates"),
        latent_dim=latent_dim,
        downsample_factors=top.counts("downsample_factor"),
        codebook_sizes=(semantic, *[top.count("codebook_size")] * num_residual),
        codebook_dim=top.count("codebook_dim"),
        convnext_multiple=top.count("convnext_mult", 4),
        encoder_transformers=(None,) * len(encoder_rates),
        pre=transformer(top.count("pre_layers")),
        post=transformer(top.count("post_layers")),
    )
    top.must_be("causal", True)
    top.must_be("hop", config.frame_samples)
    top.must_be("quantizers_total", config.num_codebooks)
    top.ignore("type", "frame_rate", "encoder_lookahead_training_samples")
    top.finish()
    return config
