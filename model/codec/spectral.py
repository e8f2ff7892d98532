"""A small 24 kHz speech codec with a spectral head: 25 frames/s, 8 codebooks of 1024.

    wav -> two log-mel views (100 Hz) -> ConvNeXt -> merge 4 -> windowed attention -> residual VQ -> codes (25 Hz)
    codes -> windowed attention -> split 4 -> ConvNeXt (100 Hz) -> magnitude and phase -> inverse STFT -> wav

The decoder is causal: a code frame gives `frame_samples` finished samples, with no look-ahead and no delay. The
encoder sees the whole clip (it only ever reads references and training data), so `decode(encode(wav))` is aligned
with `wav`.

Decoder state, all fp32, leading dimension `num_slots` (`CodecState`):
    num_frames: i64 [S]                                     frames decoded, capped at the attention window
    keys_values: [S, decoder_layers, 2, num_heads, attention_frames - 1, head_dim]   oldest first
    conv: [S, decoder_blocks, kernel - 1, decoder_dim]      last inputs of each depthwise convolution
    tail: [S, window_samples - hop_samples]                 overlap-add samples that later frames complete
Positions are relative, so a stream may be of any length.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.codec.config import MAX_RATE_HZ
from model.codec.spectral_layers import ConvNeXt, WindowLayer, overlap_add
from model.codec.spectral_stream import FusedDecoder

CodecState = dict[str, Tensor]

REFERENCE_DBFS = -23.0  # of speech, the median of the training's clips
PAUSE_DB = 30.0  # below the loudest 20 ms: not speech
MEL_FLOOR = 4e-4  # additive, in units of a full-scale sine: near-digital silence stays quiet


@dataclass(frozen=True)
class SpectralConfig:
    """The `codec_config` of config.json with `"type": "spectral"`."""

    sample_rate: int = 24000
    hop_samples: int = 240
    hops_per_frame: int = 4
    window_samples: int = 720
    mel_views: tuple[tuple[int, int], ...] = ((1200, 128), (240, 40))  # (window samples, bands)
    encoder_dim: int = 256
    encoder_hidden_dim: int = 768
    encoder_blocks: int = 3
    encoder_layers: int = 1
    dim: int = 256
    num_heads: int = 4
    ffn_dim: int = 512
    attention_frames: int = 24
    decoder_layers: int = 2
    decoder_dim: int = 320
    decoder_hidden_dim: int = 800
    decoder_blocks: int = 6
    kernel: int = 7
    num_codebooks: int = 8
    codebook_size: int = 1024
    codebook_dim: int = 8

    def __post_init__(self) -> None:
        assert self.window_samples % self.hop_samples == 0, (self.window_samples, self.hop_samples)
        assert self.dim % self.num_heads == 0, (self.dim, self.num_heads)
        assert self.kernel % 2 == 1, self.kernel

    @property
    def frame_samples(self) -> int:
        return self.hop_samples * self.hops_per_frame

    @property
    def num_bins(self) -> int:
        return self.window_samples // 2 + 1

    def layer(self, causal: bool) -> WindowLayer:
        """An attention layer of these sizes."""
        return WindowLayer(
            self.dim, self.num_heads, self.ffn_dim, self.attention_frames, causal=causal
        )

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Read `codec_config`; a key this codec does not know is refused by name."""
        values = dict(raw)
        kind = values.pop("type", None)
        if kind != "spectral":
            raise ValueError(f"codec_config.type: found {kind!r}, expected 'spectral'")
        unknown = sorted(values.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"codec_config: unknown keys {unknown}")
        rate_hz = values.get("sample_rate", cls.sample_rate)
        if not isinstance(rate_hz, int) or not 0 < rate_hz <= MAX_RATE_HZ:
            raise ValueError(
                f"codec_config.sample_rate: expected 1 to {MAX_RATE_HZ}, found {rate_hz!r}"
            )
        if "mel_views" in values:
            values["mel_views"] = tuple((int(w), int(b)) for w, b in values["mel_views"])
        return cls(**values)


def mel_filters(window_samples: int, num_bands: int, sample_rate: int) -> Tensor:
    """Triangular mel filters whose rows add up to 1: [window_samples // 2 + 1, num_bands]"""
    nyquist_hz = sample_rate / 2
    low, high = (2595 * math.log10(1 + hz / 700) for hz in (20, nyquist_hz))
    edges_hz = 700 * (10 ** (torch.linspace(low, high, num_bands + 2) / 2595) - 1)
    bins_hz = torch.linspace(0, nyquist_hz, window_samples // 2 + 1)[:, None]
    left, centre, right = edges_hz[:-2], edges_hz[1:-1], edges_hz[2:]
    rising = (bins_hz - left) / (centre - left)
    falling = (right - bins_hz) / (right - centre)
    filters = torch.minimum(rising, falling).clamp(min=0)
    # The lowest bands of a short window fall between two bins: they take the nearest one.
    for band in (filters.sum(0) == 0).nonzero().flatten().tolist():
        filters[round(centre[band].item() / nyquist_hz * (window_samples // 2)), band] = 1
    return filters / filters.sum(0)


class Encoder(nn.Module):
    """Waveform to latent frames; reads log-mel magnitudes only, phase is the decoder's own."""

    def __init__(self, config: SpectralConfig) -> None:
        super().__init__()
        self.config = config
        for i, (window, bands) in enumerate(config.mel_views):
            filters = mel_filters(window, bands, config.sample_rate)
            self.register_buffer(f"filters_{i}", filters, persistent=False)
            self.register_buffer(f"window_{i}", torch.hann_window(window), persistent=False)
        dim = config.encoder_dim
        self.input = nn.Linear(sum(bands for _, bands in config.mel_views), dim)
        self.blocks = nn.ModuleList(
            ConvNeXt(dim, config.encoder_hidden_dim, config.kernel, causal=False)
            for _ in range(config.encoder_blocks)
        )
        self.merge = nn.Linear(dim * config.hops_per_frame, config.dim)
        self.layers = nn.ModuleList(
            config.layer(causal=False) for _ in range(config.encoder_layers)
        )

    def features(self, wav: Tensor) -> Tensor:
        """wav: f32 [B, N], whole frames -> [B, N / hop, bands]; hop t is centred where the decoder's window t is."""
        hop, centre = self.config.hop_samples, self.config.window_samples // 2
        num_hops = wav.shape[1] // hop
        views = []
        for i, (window, _) in enumerate(self.config.mel_views):
            left = window // 2 - centre
            right = (num_hops - 1) * hop + centre + window // 2 - wav.shape[1]
            chunks = F.pad(wav, (left, right)).unfold(1, window, hop)
            magnitude = torch.fft.rfft(chunks * self.get_buffer(f"window_{i}")).abs()
            mel = magnitude @ self.get_buffer(f"filters_{i}") / math.sqrt(0.375 * window)
            views.append(torch.log10(mel + MEL_FLOOR) + 2.0)
        return torch.cat(views, dim=-1)

    def latent(self, features: Tensor) -> Tensor:
        """features: [B, H, bands] -> f32 [B, H / hops_per_frame, dim], normalised"""
        h = self.input(features)
        for block in self.blocks:
            h = block(h)
        h = self.merge(h.reshape(h.shape[0], -1, self.merge.in_features))
        for layer in self.layers:
            h = layer(h)
        return F.layer_norm(h.float(), h.shape[-1:])


class QuantizerStage(nn.Module):
    """Projects to a few dimensions and takes the codebook row of the nearest direction."""

    def __init__(self, dim: int, codebook_size: int, codebook_dim: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(dim, codebook_dim)
        self.out_proj = nn.Linear(codebook_dim, dim)
        self.codebook = nn.Embedding(codebook_size, codebook_dim)
        # Variance-preserving and tied at the start: the decoder sees a usable latent from step one.
        nn.init.normal_(self.in_proj.weight, std=dim**-0.5)
        nn.init.zeros_(self.in_proj.bias)
        nn.init.zeros_(self.out_proj.bias)
        with torch.no_grad():
            self.out_proj.weight.copy_(self.in_proj.weight.t())

    def search(self, projected: Tensor) -> Tensor:
        """projected: f32 [..., codebook_dim] -> i64 [...]"""
        book = F.normalize(self.codebook.weight, dim=-1)
        return (F.normalize(projected, dim=-1) @ book.t()).argmax(-1)


class Quantizer(nn.Module):
    """Residual stages: each codes what the ones before it left; their vectors add up."""

    def __init__(self, config: SpectralConfig) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            QuantizerStage(config.dim, config.codebook_size, config.codebook_dim)
            for _ in range(config.num_codebooks)
        )

    def __iter__(self) -> Iterator[QuantizerStage]:
        return (stage for stage in self.stages if isinstance(stage, QuantizerStage))

    def encode(self, latent: Tensor) -> Tensor:
        """latent: f32 [B, T, dim] -> codes: i64 [B, K, T]"""
        codes, residual = [], latent
        for stage in self:
            code = stage.search(stage.in_proj(residual))
            residual = residual - stage.out_proj(stage.codebook(code))
            codes.append(code)
        return torch.stack(codes, dim=1)

    def decode(self, codes: Tensor) -> Tensor:
        """codes: integer [B, K, T] -> latent: f32 [B, T, dim]"""
        return torch.stack(
            [s.out_proj(s.codebook(codes[:, i].long())) for i, s in enumerate(self)]
        ).sum(0)


class Decoder(nn.Module):
    """A quantised latent to samples: causal attention at the frame rate, causal ConvNeXt blocks at
    that of the hops, and a spectrum for each hop, whose waves overlap."""

    def __init__(self, config: SpectralConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.decoder_dim
        self.layers = nn.ModuleList(config.layer(causal=True) for _ in range(config.decoder_layers))
        self.split = nn.Linear(config.dim, dim * config.hops_per_frame)
        self.norm_in = nn.LayerNorm(dim)
        self.blocks = nn.ModuleList(
            ConvNeXt(dim, config.decoder_hidden_dim, config.kernel, causal=True)
            for _ in range(config.decoder_blocks)
        )
        self.norm_out = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 2 * config.num_bins)
        overlap = config.window_samples // config.hop_samples
        window = torch.hann_window(config.window_samples) * (2 / overlap)  # windows add up to 1
        self.register_buffer("window", window, persistent=False)
        with torch.no_grad():
            self.head.weight.mul_(0.3)
            self.head.bias.zero_()
            self.head.bias[: config.num_bins] = -4.0

    def hidden(self, latent: Tensor) -> Tensor:
        """latent: [B, T, dim] -> [B, T * hops_per_frame, decoder_dim], before the last norm"""
        for layer in self.layers:
            latent = layer(latent)
        h: Tensor = self.norm_in(
            self.split(latent).reshape(latent.shape[0], -1, self.config.decoder_dim)
        )
        for block in self.blocks:
            h = block(h)
        return h

    def chunks(self, spectrum: Tensor) -> Tensor:
        """spectrum: f32 [B, H, 2 * num_bins], log magnitude then phase -> windowed [B, H, window]"""
        log_magnitude, phase = spectrum.chunk(2, dim=-1)
        magnitude = log_magnitude.clamp(max=4.0).exp()
        bins = torch.complex(magnitude * phase.cos(), magnitude * phase.sin())
        wave = torch.fft.irfft(bins, n=self.config.window_samples, norm="ortho")
        chunks: Tensor = wave * self.get_buffer("window")
        return chunks

    def synthesize(self, hidden: Tensor) -> Tensor:
        """hidden: f32 [B, H, decoder_dim] -> wav: f32 [B, H * hop]"""
        chunks = self.chunks(self.head(self.norm_out(hidden)))
        tail = chunks.new_zeros(
            chunks.shape[0], self.config.window_samples - self.config.hop_samples
        )
        return overlap_add(chunks, tail, self.config.hop_samples)[0]


def to_level(wav: Tensor, window: int, dbfs: float) -> Tensor:
    """wav: f32 [B, N], scaled so that its speech, in windows of `window` samples, has an RMS of `dbfs`
    but no sample leaves -1..1; silence stays."""
    windows = F.pad(wav, (0, -wav.shape[1] % window)).reshape(len(wav), -1, window)
    power = windows.square().mean(2)
    speech = power > power.amax(1, keepdim=True) * 10 ** (-PAUSE_DB / 10)
    mean = (power * speech).sum(1, keepdim=True) / speech.sum(1, keepdim=True).clamp(min=1)
    gain = 10 ** (dbfs / 20) / mean.sqrt()
    peak = wav.abs().amax(1, keepdim=True)
    return wav * torch.where(peak > 0, torch.minimum(gain, 1 / peak), torch.ones_like(gain))


class SpectralCodec(nn.Module):
    """Encoder, residual quantiser and streaming decoder behind the codec interface."""

    def __init__(self, config: SpectralConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.quantizer = Quantizer(config)
        self.decoder = Decoder(config)
        self._fused: FusedDecoder | None = None

    @property
    def sample_rate(self) -> int:
        return self.config.sample_rate

    @property
    def frame_samples(self) -> int:
        return self.config.frame_samples

    @property
    def num_codebooks(self) -> int:
        return self.config.num_codebooks

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        return (self.config.codebook_size,) * self.config.num_codebooks

    @property
    def has_exact_chunks(self) -> bool:
        """Attention over one query and over several are different products."""
        return False

    def unfuse(self) -> None:
        """Forget the fused weights: the next `decode_stream` builds them from the parameters."""
        self._fused = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Devices are followed, precisions are not: the transforms exist in fp32 alone."""
        self.unfuse()
        super()._apply(  # type: ignore[no-untyped-call]
            lambda t: fn(t).float() if t.is_floating_point() else fn(t), recurse
        )
        return self

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        self.unfuse()
        return super().load_state_dict(state_dict, strict, assign)

    def train(self, mode: bool = True) -> Self:
        self.unfuse()
        return super().train(mode)

    @torch.inference_mode()
    def encode(self, wav: Tensor) -> Tensor:
        """wav: f32 [B, N] -> codes: i32 [B, K, ceil(N / frame_samples)]"""
        assert wav.dim() == 2 and wav.shape[1] > 0, wav.shape
        wav = F.pad(wav, (0, -wav.shape[1] % self.frame_samples))
        latent = self.encoder.latent(self.encoder.features(wav))
        return self.quantizer.encode(latent).int()

    def encode_reference(self, wav: Tensor) -> Tensor:
        """`encode` at the level the codec knows. Speech 30 dB quieter is copied as somebody else's:
        the cosine of its voice to the original falls from 0.84-0.98 to 0.75-0.83."""
        return self.encode(to_level(wav, self.sample_rate // 50, REFERENCE_DBFS))

    @torch.inference_mode()
    def decode(self, codes: Tensor) -> Tensor:
        """codes: i32 [B, K, T] -> wav: f32 [B, T * frame_samples]"""
        hidden = self.decoder.hidden(self.quantizer.decode(codes))
        return self.decoder.synthesize(hidden)

    def init_state(self, num_slots: int) -> CodecState:
        """State of `num_slots` streams at their start; the module's docstring has the schema."""
        c, device = self.config, self.decoder.head.weight.device
        head_dim, past = c.dim // c.num_heads, c.attention_frames - 1
        shapes = {
            "keys_values": (c.decoder_layers, 2, c.num_heads, past, head_dim),
            "conv": (c.decoder_blocks, c.kernel - 1, c.decoder_dim),
            "tail": (c.window_samples - c.hop_samples,),
        }
        state = {k: torch.zeros(num_slots, *shape, device=device) for k, shape in shapes.items()}
        state["num_frames"] = torch.zeros(num_slots, dtype=torch.int64, device=device)
        return state

    def state_tensors(self, state: CodecState) -> list[Tensor]:
        """What the state is made of."""
        return list(state.values())

    @torch.inference_mode()
    def reset_state(self, state: CodecState, rows: Tensor) -> None:
        """Start the streams in rows: i64 [R] again."""
        for tensor in state.values():
            tensor.index_fill_(0, rows, 0)

    @torch.inference_mode()
    def decode_stream(self, codes: Tensor, state: CodecState, rows: Tensor) -> Tensor:
        """Continue the streams in rows: i64 [B] by codes: i32 [B, K, T] -> f32 [B, T * frame_samples]"""
        if self._fused is None:
            self._fused = FusedDecoder(self)
        return self._fused.step(codes, state, rows)
