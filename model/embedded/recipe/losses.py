"""What the codec is trained against: multi-resolution spectra and two families of discriminators."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from model.codec.spectral import MEL_FLOOR, mel_filters

SCALES = ((64, 10), (128, 20), (256, 40), (512, 80), (1024, 100), (2048, 160))  # (window, bands)
MIN_STFT_WINDOW = 512


def stft(wav: Tensor, window: Tensor) -> Tensor:
    """wav: f32 [B, N] -> complex [B, frames, bins], a quarter of the window per hop, silence beyond the ends.

    Framed by `unfold`: the gradient of `torch.stft`'s own framing scatters element by element.
    """
    size = len(window)
    frames = F.pad(wav, (size // 2, size // 2)).unfold(1, size, size // 4)
    bins: Tensor = torch.fft.rfft(frames * window)
    return bins


class SpectralLoss(nn.Module):
    """L1 between log-mel spectra at six resolutions, and between STFT magnitudes at the longer three.

    The floor is added, not clamped: synthetic speech has near-digital silence, whose logarithm would
    otherwise own the gradient.
    """

    def __init__(self, sample_rate: int) -> None:
        super().__init__()
        for window, bands in SCALES:
            filters = mel_filters(window, bands, sample_rate)
            self.register_buffer(f"filters_{window}", filters, persistent=False)
            self.register_buffer(f"window_{window}", torch.hann_window(window), persistent=False)

    def magnitude(self, wav: Tensor, window: int) -> Tensor:
        """wav: f32 [B, N] -> [B, frames, bins]"""
        bins = torch.view_as_real(stft(wav, self.get_buffer(f"window_{window}")))
        return bins.square().sum(-1).add(1e-9).sqrt()

    def forward(self, made: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """made, real: f32 [B, N] -> log-mel distance (mean over scales), STFT distance (sum)"""
        mel, stft = made.new_zeros(()), made.new_zeros(())
        for window, _ in SCALES:
            filters = self.get_buffer(f"filters_{window}")
            floor = MEL_FLOOR * math.sqrt(0.375 * window)
            with torch.no_grad():
                want = self.magnitude(real, window)
            have = self.magnitude(made, window)
            log_mel = [torch.log10(magnitude @ filters + floor) for magnitude in (have, want)]
            mel = mel + (log_mel[0] - log_mel[1]).abs().mean() / len(SCALES)
            if window >= MIN_STFT_WINDOW:
                stft = stft + (have - want).abs().mean() / want.mean()
                stft = stft + (torch.log10(have + floor) - torch.log10(want + floor)).abs().mean()
        return mel, stft


class SpectrumDiscriminator(nn.Module):
    """Complex STFT as an image [time, frequency]; the first convolutions halve the frequency axis."""

    def __init__(self, window: int, dim: int) -> None:
        super().__init__()
        self.window_samples = window
        self.register_buffer("window", torch.hann_window(window), persistent=False)
        wide = [
            nn.Conv2d(d_in, dim, (3, 9), (1, 2), (dilation, 4), dilation=(dilation, 1))
            for d_in, dilation in ((2, 1), (dim, 1), (dim, 2))
        ]
        self.convs = nn.ModuleList(
            weight_norm(conv) for conv in [*wide, nn.Conv2d(dim, dim, 3, 1, 1)]
        )
        self.out = weight_norm(nn.Conv2d(dim, 1, 3, 1, 1))

    def image(self, wav: Tensor) -> Tensor:
        """wav: f32 [B, N] -> [B, 2, frames, bins], magnitude compressed by a square root"""
        x = torch.view_as_real(stft(wav, self.get_buffer("window"))) / math.sqrt(
            self.window_samples
        )
        x = x * (x.square().sum(-1, keepdim=True) + 1e-6).pow(-0.25)
        return x.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)

    def forward(self, wav: Tensor) -> list[Tensor]:
        """wav: f32 [B, N] -> feature maps, the last is the verdict"""
        with torch.autocast(wav.device.type, enabled=False):
            x = self.image(wav.float())
        maps = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            maps.append(x)
        return [*maps, self.out(x)]


class PeriodDiscriminator(nn.Module):
    """Every `period`-th sample, all phases as rows of one 1-D convolution."""

    def __init__(self, period: int, dim: int) -> None:
        super().__init__()
        self.period = period
        dims = [1, dim, 2 * dim, 4 * dim, 8 * dim, 8 * dim]
        self.convs = nn.ModuleList(
            weight_norm(nn.Conv1d(d_in, d_out, 5, stride, 2))
            for d_in, d_out, stride in zip(dims, dims[1:], (3, 3, 3, 3, 1), strict=False)
        )
        self.out = weight_norm(nn.Conv1d(dims[-1], 1, 3, 1, 1))

    def forward(self, wav: Tensor) -> list[Tensor]:
        """wav: f32 [B, N] -> feature maps [B * period, channels, time], the last is the verdict"""
        wav = F.pad(wav, (0, -wav.shape[1] % self.period))
        x = (
            wav.view(len(wav), -1, self.period)
            .transpose(1, 2)
            .reshape(-1, 1, wav.shape[1] // self.period)
        )
        maps = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            maps.append(x)
        return [*maps, self.out(x)]


class Discriminators(nn.Module):
    def __init__(
        self,
        spectrum_dim: int = 32,
        period_dim: int = 16,
        windows: Sequence[int] = (2048, 1024, 512),
        periods: Sequence[int] = (2, 3, 5, 7, 11),
    ) -> None:
        super().__init__()
        self.spectrum = nn.ModuleList(SpectrumDiscriminator(n, spectrum_dim) for n in windows)
        self.period = nn.ModuleList(PeriodDiscriminator(p, period_dim) for p in periods)
        for module in self.modules():
            if isinstance(module, nn.Conv1d | nn.Conv2d):
                weight = torch.empty_like(module.weight)
                nn.init.kaiming_normal_(weight, a=0.1)
                module.weight = weight  # through the weight norm
                nn.init.zeros_(module.bias)

    def forward(self, wav: Tensor) -> list[list[Tensor]]:
        return [d(wav) for d in (*self.spectrum, *self.period)]


def level(wav: Tensor, reference: Tensor) -> Tensor:
    """Bring crops f32 [B, N] near one loudness, by the level of `reference`: quiet ones count too."""
    rms = reference.square().mean(1, keepdim=True).sqrt()
    return wav * (0.1 / (rms + 0.01))


def discriminator_loss(outputs: list[list[Tensor]]) -> Tensor:
    """Least squares of D([real, made]) per discriminator: [D]; 0.5 is chance."""
    losses = []
    for maps in outputs:
        real, made = maps[-1].float().chunk(2)
        losses.append((1 - real).square().mean() + made.square().mean())
    return torch.stack(losses)


def generator_loss(made: list[list[Tensor]], real: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """Adversarial loss (mean) and relative distance of the feature maps (mean over discriminators)."""
    adversarial = torch.stack([(1 - maps[-1].float()).square().mean() for maps in made]).mean()
    matching = [
        (m.float() - r.float()).abs().mean() / (r.float().abs().mean() + 1e-3)
        for made_maps, real_maps in zip(made, real, strict=True)
        for m, r in zip(made_maps[:-1], real_maps[:-1], strict=True)
    ]
    return adversarial, torch.stack(matching).sum() / len(made)
