"""Sizes of the modded DAC, from either of the two JSON schemas in use.

`nested`: the sizes of the quantiser under `quantizer`, of its transformers under
`quantizer.pre_post`. `flat`: everything at one level. Both become one `DacConfig`; an unknown
key is an error, so that no setting is silently ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.errors import ConfigError
from model.json_fields import Fields


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
        return read(Fields(raw, "codec_config"))

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
MAX_RATE_HZ = 192_000
_MAX_CODEBOOKS = 1024


def _read_nested(top: Fields) -> DacConfig:
    general, quantizer = top.child("transformer"), top.child("quantizer")
    pre_post = quantizer.child("pre_post")
    head_dim, rope_base = general.integer("head_dim"), general.number("rope_base")
    norm_eps, multiple = general.number("norm_eps"), general.integer("intermediate_multiple")
    window = general.integer("encoder_window")
    encoder_dim, latent_dim = top.integer("encoder_dim"), quantizer.integer("input_dim")
    layers = top.integers("encoder_transformer_layers", least=0)

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
        num_layers=pre_post.integer("n_layer"),
        num_heads=pre_post.integer("n_head"),
        head_dim=head_dim,
        dim=pre_post.integer("dim"),
        intermediate_dim=pre_post.integer("intermediate_size"),
        window=pre_post.integer("window_size"),
        rope_base=rope_base,
        norm_eps=norm_eps,
    )
    pre_post.expect("causal", True)
    semantic, num_residual = (
        quantizer.integer("semantic_codebook_size"),
        quantizer.integer("n_codebooks", most=_MAX_CODEBOOKS),
    )
    config = DacConfig(
        sample_rate=top.integer("sample_rate", most=MAX_RATE_HZ),
        encoder_dim=encoder_dim,
        encoder_rates=top.integers("encoder_rates"),
        decoder_dim=top.integer("decoder_dim"),
        decoder_rates=top.integers("decoder_rates"),
        latent_dim=latent_dim,
        downsample_factors=quantizer.integers("downsample_factor"),
        codebook_sizes=(semantic, *[quantizer.integer("codebook_size")] * num_residual),
        codebook_dim=quantizer.integer("codebook_dim"),
        convnext_multiple=4,
        encoder_transformers=tuple(encoder_transformer(i, n) for i, n in enumerate(layers)),
        pre=transformer,
        post=transformer,
    )
    # The decoder's transformers are configured in published checkpoints but hold no weights.
    unused = top.integers(_UNUSED_LAYERS, [0] * len(config.decoder_rates), least=0)
    if len(unused) != len(config.decoder_rates):
        raise ConfigError(
            f"codec_config: {len(unused)} {_UNUSED_LAYERS} for {len(config.decoder_rates)} "
            "decoder_rates; they must agree"
        )
    top.ignore("type")
    for fields in (pre_post, quantizer, general, top):
        fields.close()
    return config


def _read_flat(top: Fields) -> DacConfig:
    latent_dim, encoder_rates = top.integer("latent_dim"), top.integers("encoder_rates")
    num_heads, head_dim = top.integer("tf_heads"), top.integer("tf_head_dim")
    intermediate_dim, window = top.integer("tf_inter"), top.integer("window")
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
        top.integer("semantic_codebook_size"),
        top.integer("n_codebooks", most=_MAX_CODEBOOKS),
    )
    config = DacConfig(
        sample_rate=top.integer("sample_rate", most=MAX_RATE_HZ),
        encoder_dim=top.integer("encoder_dim"),
        encoder_rates=encoder_rates,
        decoder_dim=top.integer("decoder_dim"),
        decoder_rates=top.integers("decoder_rates"),
        latent_dim=latent_dim,
        downsample_factors=top.integers("downsample_factor"),
        codebook_sizes=(semantic, *[top.integer("codebook_size")] * num_residual),
        codebook_dim=top.integer("codebook_dim"),
        convnext_multiple=top.integer("convnext_mult", 4),
        encoder_transformers=(None,) * len(encoder_rates),
        pre=transformer(top.integer("pre_layers")),
        post=transformer(top.integer("post_layers")),
    )
    top.expect("causal", True)
    top.expect("hop", config.frame_samples)
    top.expect("quantizers_total", config.num_codebooks)
    top.ignore("type", "frame_rate", "encoder_lookahead_training_samples")
    top.close()
    return config
