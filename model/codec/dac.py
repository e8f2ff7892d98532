"""The modded DAC: waveform <-> codes, whole clips or streams continued frame by frame.

Encoder: convolutions -> window transformer -> downsampling -> window transformer -> residual
vector quantiser. Decoder: sum of codebook rows -> window transformer -> upsampling ->
convolutions. Every part is causal with no look-ahead, so a stream's state is the inputs that its
convolutions still need and the keys and values in its attention window; a whole clip is decoded
as one stream, in pieces that bound the memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from model.codec.checkpoint import Weights
from model.codec.config import DacConfig, TransformerConfig
from model.codec.dac_fused import MAX_PASS_FRAMES, FusedDecoder, has_kernels, pass_sizes
from model.codec.dac_layers import (
    CausalConv,
    CausalTransposedConv,
    ConvNeXt,
    HistoryLayout,
    KvRing,
    ResidualUnit,
    Snake,
    WindowTransformer,
)
from ops import codec as ops

_DILATIONS = (1, 3, 9)


@dataclass
class DacState:
    """Everything a stream needs to go on; row i of every tensor belongs to stream i.

    positions: i64 [num_slots] # frames decoded so far
    history: dtype [num_slots, num_values] # past inputs of every convolution, side by side
    ring: keys, values dtype [num_slots, num_layers, window, heads, head_dim]
    """

    positions: Tensor
    history: Tensor
    ring: KvRing


class DacCodec:
    """The codec. Weights are read-only after construction; all streaming state is the caller's."""

    def __init__(
        self, config: DacConfig, weights: Weights, *, is_fused: bool | None = None
    ) -> None:
        """`is_fused`: decode over the ops of `ops.codec`; by default where they are kernels."""
        is_fused = has_kernels(weights.device, config) if is_fused is None else is_fused
        self.config = config
        self.device, self.dtype = weights.device, weights.dtype
        self.sample_rate = config.sample_rate
        self.frame_samples = config.frame_samples
        self.num_codebooks = config.num_codebooks
        self.codebook_sizes = config.codebook_sizes
        quantizer = weights.at("quantizer")
        self.encoder = _Encoder(config, weights.at("encoder"), quantizer)
        self.quantizer = Quantizer(config, quantizer)
        self.decoder: _Decoder | FusedDecoder
        if is_fused:
            # Half precision: 11 bits of mantissa against 8 of bf16, at the same speed.
            self.state_dtype = torch.float16 if weights.device.type == "cuda" else self.dtype
            books = self.quantizer.codebooks(config.post)
            self.decoder = FusedDecoder(
                config, weights.at("decoder"), quantizer, books, self.state_dtype
            )
        else:
            self.state_dtype = self.dtype
            self.decoder = _Decoder(config, weights.at("decoder"), quantizer)

    @property
    def has_exact_chunks(self) -> bool:
        """The kernels add up every sum in an order of its own, libraries in one of their choice."""
        return isinstance(self.decoder, FusedDecoder) and self.device.type == "cuda"

    def encode_reference(self, wav: Tensor) -> Tensor:
        """`encode`: this codec was trained on recordings of every level."""
        return self.encode(wav)

    @torch.no_grad()
    def encode(self, wav: Tensor) -> Tensor:
        """Encode whole clips.

        Args:
            wav: f32 [B, N] — mono at `sample_rate`, in -1..1.

        Returns:
            i32 [B, K, ceil(N / frame_samples)].
        """
        assert wav.dim() == 2 and wav.dtype == torch.float32, (wav.shape, wav.dtype)
        wav = F.pad(wav.to(self.device), (0, -wav.shape[1] % self.frame_samples))
        stream = self.encoder.start(len(wav))
        codes = [
            self.quantizer.encode(self.encoder(piece[..., None].to(self.dtype), stream))
            for piece in torch.split(wav, MAX_PASS_FRAMES * self.frame_samples, dim=1)
            if piece.shape[1]
        ]
        if not codes:
            return torch.zeros(
                len(wav), self.num_codebooks, 0, dtype=torch.int32, device=self.device
            )
        return torch.cat(codes, dim=2)

    def decode(self, codes: Tensor) -> Tensor:
        """Decode whole clips.

        Args:
            codes: i32 [B, K, T] — clamped to each codebook's range in a copy.

        Returns:
            f32 [B, T * frame_samples], in -1..1.
        """
        rows = torch.arange(len(codes), device=self.device)
        return self.decode_stream(codes.to(self.device), self.init_state(len(codes)), rows)

    def init_state(self, num_slots: int) -> DacState:
        """Allocate the state of `num_slots` streams, all at their beginning."""
        history = torch.zeros(
            num_slots, self.decoder.layout.num_values, device=self.device, dtype=self.state_dtype
        )
        positions = torch.zeros(num_slots, dtype=torch.int64, device=self.device)
        ring = KvRing.zeros(num_slots, self.config.post, self.device, self.state_dtype)
        return DacState(positions, history, ring)

    def state_tensors(self, state: DacState) -> list[Tensor]:
        """What the state is made of."""
        return [state.positions, state.history, state.ring.keys, state.ring.values]

    def reset_state(self, state: DacState, rows: Tensor) -> None:
        """Put the streams in `rows` (i64 [R]) back to their beginning."""
        # The ring needs no clearing: at position 0 all of it is masked.
        state.positions.index_fill_(0, rows, 0)
        state.history.index_fill_(0, rows, 0)

    @torch.no_grad()
    def decode_stream(self, codes: Tensor, state: DacState, rows: Tensor) -> Tensor:
        """Continue the streams in `rows` by T frames, without a host sync.

        Args:
            codes: i32 [B, K, T] — clamped to each codebook's range in a copy.
            state: advanced in place; rows that are not named stay as they are.
            rows: i64 [B] — distinct slots of the state, in any order.

        Returns:
            f32 [B, T * frame_samples], in -1..1.
        """
        assert codes.dim() == 3 and codes.shape[1] == self.num_codebooks, codes.shape
        assert rows.shape == codes.shape[:1], (rows.shape, codes.shape)
        if not codes.shape[2]:
            return torch.zeros(len(codes), 0, device=self.device)
        is_fused = isinstance(self.decoder, FusedDecoder)
        sizes = pass_sizes(codes.shape[2]) if is_fused else MAX_PASS_FRAMES
        pieces = [
            self._decode_piece(piece, state, rows) for piece in torch.split(codes, sizes, dim=2)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def _decode_piece(self, codes: Tensor, state: DacState, rows: Tensor) -> Tensor:
        if isinstance(self.decoder, FusedDecoder):
            flat = codes.transpose(1, 2).flatten(0, 1).int().contiguous()
            return self.decoder(flat, rows, state.positions, state.history, state.ring)
        positions = state.positions.index_select(0, rows)
        history = state.history.index_select(0, rows)
        latents = self.quantizer.decode(codes)
        wav = self.decoder(latents, history, state.ring, rows, positions)
        state.history.index_copy_(0, rows, history)
        state.positions.index_copy_(0, rows, positions + codes.shape[2])
        return wav


class Quantizer:
    """Residual vector quantiser: codes <-> latents."""

    def __init__(self, config: DacConfig, weights: Weights) -> None:
        dim, code_dim, sizes = config.latent_dim, config.codebook_dim, config.codebook_sizes
        paths: list[tuple[str, int]] = [("semantic_quantizer", 0)]
        paths += [("quantizer", i) for i in range(len(sizes) - 1)]
        self.projections: list[tuple[Tensor, Tensor]] = []  # ([code_dim, C], [code_dim])
        self.directions: list[Tensor] = []  # unit codebook rows [size, code_dim]
        tables: list[Tensor] = []
        for (name, i), size in zip(paths, sizes, strict=True):
            at = weights.at(name, "quantizers", i)
            codebook = at.take("codebook.weight", size, code_dim)
            in_weight = at.take("in_proj.weight", code_dim, dim, 1)[..., 0]
            self.projections.append(
                (_f32(at, in_weight), _f32(at, at.take("in_proj.bias", code_dim)))
            )
            self.directions.append(_f32(at, F.normalize(codebook)))
            out_weight = at.take("out_proj.weight", dim, code_dim, 1)[..., 0]
            tables.append(codebook @ out_weight.T + at.take("out_proj.bias", dim))
        # The whole dequantiser is a sum of rows: each codebook's rows after its own projection.
        self.table = _f32(weights, torch.cat(tables))  # f32 [sum of sizes, C]
        bounds = torch.tensor([0, *sizes], device=weights.device)
        self.offsets = bounds.cumsum(0)[:-1, None]  # i64 [K, 1], where each codebook's rows start
        self.last_codes = (bounds[1:] - 1)[:, None]  # i64 [K, 1]
        self.dtype = weights.dtype

    def codebooks(self, post: TransformerConfig) -> ops.Codebooks:
        """For the fused decoder."""
        device = self.table.device
        half = torch.arange(0, post.head_dim, 2).float() / post.head_dim
        return ops.Codebooks(
            table=self.table,
            offsets=self.offsets[:, 0].int().contiguous(),
            last_codes=self.last_codes[:, 0].int().contiguous(),
            frequencies=(1.0 / post.rope_base**half).to(device),
        )

    def decode(self, codes: Tensor) -> Tensor:
        """codes int [B, K, T] -> latents [B, T, C]."""
        rows = torch.minimum(codes.long().clamp_min(0), self.last_codes) + self.offsets
        return F.embedding(rows, self.table).sum(1).to(self.dtype)

    def encode(self, latents: Tensor) -> Tensor:
        """latents [B, T, C] -> codes i32 [B, K, T]: per codebook the row nearest in angle."""
        residual, codes = latents.float(), []
        for i in range(len(self.directions)):
            code = self.similarity(residual, i).argmax(-1)
            residual = residual - F.embedding(code + self.offsets[i], self.table)
            codes.append(code)
        return torch.stack(codes, dim=1).int()

    def similarity(self, residual: Tensor, codebook: int) -> Tensor:
        """Cosine of a residual f32 [B, T, C] with every row of a codebook: f32 [B, T, size]."""
        weight, bias = self.projections[codebook]
        return F.normalize(F.linear(residual, weight, bias), dim=-1) @ self.directions[codebook].T


@dataclass
class _EncoderStream:
    rows: Tensor  # i64 [B]
    num_frames: int  # encoded so far
    history: Tensor  # [B, num_values]
    rings: list[KvRing]  # one per transformer, in order


class _Encoder:
    """Waveform [B, N, 1] -> latents [B, N / frame_samples, C]."""

    def __init__(self, config: DacConfig, weights: Weights, quantizer: Weights) -> None:
        self.layout = layout = HistoryLayout()
        dim = config.encoder_dim
        self.conv_in = CausalConv(weights.at("block", 0, "conv"), layout, 1, dim, 7)
        self.blocks: list[_EncoderBlock] = []
        for i, rate in enumerate(config.encoder_rates):
            at = weights.at("block", i + 1, "block")
            block = _EncoderBlock(at, layout, dim, rate)
            transformer = config.encoder_transformers[i]
            if transformer is not None:
                block.transformer = WindowTransformer(at.at(5), transformer)
            self.blocks.append(block)
            dim *= 2
        last = len(self.blocks) + 1
        self.snake_out = Snake(weights.at("block", last), dim)
        self.conv_out = CausalConv(
            weights.at("block", last + 1, "conv"), layout, dim, config.latent_dim, 3
        )
        self.downsample = [
            _Resample(quantizer.at("downsample", i), layout, config, factor, is_up=False)
            for i, factor in enumerate(config.downsample_factors)
        ]
        self.pre = WindowTransformer(quantizer.at("pre_module"), config.pre)
        self.device, self.dtype = weights.device, weights.dtype
        self.frame_samples = config.frame_samples

    def start(self, num_streams: int) -> _EncoderStream:
        """Begin `num_streams` clips."""
        transformers = [b.transformer for b in self.blocks if b.transformer] + [self.pre]
        shape = (num_streams, self.layout.num_values)
        return _EncoderStream(
            rows=torch.arange(num_streams, device=self.device),
            num_frames=0,
            history=torch.zeros(shape, device=self.device, dtype=self.dtype),
            rings=[t.init_ring(num_streams) for t in transformers],
        )

    def __call__(self, x: Tensor, stream: _EncoderStream) -> Tensor:
        num_frames = x.shape[1] // self.frame_samples
        rings = iter(stream.rings)

        def attend(transformer: WindowTransformer, x: Tensor) -> Tensor:
            steps_per_frame = x.shape[1] // num_frames
            start = torch.full_like(stream.rows, stream.num_frames * steps_per_frame)
            return transformer(x, next(rings), stream.rows, start)

        x = self.conv_in(x, stream.history)
        for block in self.blocks:
            x = block(x, stream.history)
            if block.transformer is not None:
                x = attend(block.transformer, x)
        x = self.conv_out(self.snake_out(x), stream.history)
        for layer in self.downsample:
            x = layer(x, stream.history)
        x = attend(self.pre, x)
        stream.num_frames += num_frames
        return x


class _EncoderBlock:
    transformer: WindowTransformer | None = None

    def __init__(self, weights: Weights, layout: HistoryLayout, dim: int, rate: int) -> None:
        self.units = [
            ResidualUnit(weights.at(i), layout, dim, dilation)
            for i, dilation in enumerate(_DILATIONS)
        ]
        self.snake = Snake(weights.at(3), dim)
        self.conv = CausalConv(weights.at(4, "conv"), layout, dim, 2 * dim, 2 * rate, stride=rate)

    def __call__(self, x: Tensor, history: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x, history)
        return self.conv(self.snake(x), history)


class _Resample:
    """A factor of down- or upsampling around the quantiser."""

    def __init__(
        self,
        weights: Weights,
        layout: HistoryLayout,
        config: DacConfig,
        factor: int,
        is_up: bool,
    ) -> None:
        dim, at = config.latent_dim, weights.at(0, "conv")
        self.conv: CausalConv | CausalTransposedConv
        if is_up:
            self.conv = CausalTransposedConv(at, layout, dim, dim, factor, factor)
        else:
            self.conv = CausalConv(at, layout, dim, dim, factor, stride=factor)
        self.convnext = ConvNeXt(weights.at(1), layout, dim, config.convnext_multiple)

    def __call__(self, x: Tensor, history: Tensor) -> Tensor:
        return self.convnext(self.conv(x, history), history)


class _Decoder:
    """Latents [B, T, C] -> waveform f32 [B, T * frame_samples]."""

    def __init__(self, config: DacConfig, weights: Weights, quantizer: Weights) -> None:
        self.layout = layout = HistoryLayout()
        self.post = WindowTransformer(quantizer.at("post_module"), config.post)
        self.upsample = [
            _Resample(quantizer.at("upsample", i), layout, config, factor, is_up=True)
            for i, factor in enumerate(reversed(config.downsample_factors))
        ]
        dim = config.decoder_dim
        model = weights.at("model")
        self.conv_in = CausalConv(model.at(0, "conv"), layout, config.latent_dim, dim, 7)
        self.blocks: list[_DecoderBlock] = []
        for i, rate in enumerate(config.decoder_rates):
            self.blocks.append(_DecoderBlock(model.at(i + 1, "block"), layout, dim, rate))
            dim //= 2
        last = len(self.blocks) + 1
        self.snake_out = Snake(model.at(last), dim)
        self.conv_out = CausalConv(model.at(last + 1, "conv"), layout, dim, 1, 7)

    def __call__(
        self, x: Tensor, history: Tensor, ring: KvRing, rows: Tensor, positions: Tensor
    ) -> Tensor:
        x = self.post(x, ring, rows, positions)
        for layer in self.upsample:
            x = layer(x, history)
        x = self.conv_in(x, history)
        for block in self.blocks:
            x = block(x, history)
        return self.conv_out(self.snake_out(x), history)[..., 0].float().tanh()


class _DecoderBlock:
    def __init__(self, weights: Weights, layout: HistoryLayout, dim: int, rate: int) -> None:
        self.snake = Snake(weights.at(0), dim)
        self.conv = CausalTransposedConv(
            weights.at(1, "conv"), layout, dim, dim // 2, 2 * rate, rate
        )
        self.units = [
            ResidualUnit(weights.at(i + 2), layout, dim // 2, dilation)
            for i, dilation in enumerate(_DILATIONS)
        ]

    def __call__(self, x: Tensor, history: Tensor) -> Tensor:
        x = self.conv(self.snake(x), history)
        for unit in self.units:
            x = unit(x, history)
        return x


def _f32(weights: Weights, tensor: Tensor) -> Tensor:
    # Nearest-row search and the dequantiser stay in f32 whatever the codec computes in.
    return tensor.to(weights.device).contiguous()
