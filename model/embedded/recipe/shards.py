"""Teacher shards on the training device: audio, phoneme labels and clip starts, growing while the teacher writes."""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SAMPLE_RATE_HZ = 24_000
BLOCK_SAMPLES = 600
FADE_IN_SAMPLES = 480


class Batch(NamedTuple):
    wav: Tensor  # f32 [B, N]
    phonemes: Tensor  # i64 [B, T], the teacher's token id at the centre of each frame


def shard_keys(folder: Path) -> list[str]:
    """`{process}_{block}` of every finished shard (the audio file is renamed into place last)."""
    names = (re.fullmatch(r"a(\d+_\d+)\.npy", path.name) for path in folder.glob("a*.npy"))
    return sorted(match[1] for match in names if match)


class AudioBank:
    """All shards of a folder in one buffer; batches are drawn on the device."""

    def __init__(self, folder: Path, capacity_hours: float, device: torch.device) -> None:
        self.folder, self.device = folder, device
        self.capacity_blocks = int(capacity_hours * 3600 * SAMPLE_RATE_HZ / BLOCK_SAMPLES)
        self.audio = torch.empty(
            self.capacity_blocks * BLOCK_SAMPLES, dtype=torch.int16, device=device
        )
        self.labels = torch.empty(self.capacity_blocks, dtype=torch.uint8, device=device)
        self.starts = torch.empty(0, dtype=torch.int64, device=device)  # in blocks
        self.num_blocks = 0
        self.loaded: set[str] = set()

    @property
    def hours(self) -> float:
        return self.num_blocks * BLOCK_SAMPLES / SAMPLE_RATE_HZ / 3600

    def refresh(self) -> bool:
        """Load shards that have appeared since the last call; true if there were any."""
        fresh = [key for key in shard_keys(self.folder) if key not in self.loaded]
        for key in fresh:
            self._load(key)
        return bool(fresh)

    def _load(self, key: str) -> None:
        self.loaded.add(key)
        audio, labels, rows = (np.load(self.folder / f"{kind}{key}.npy") for kind in "alm")
        begin, end = self.num_blocks, self.num_blocks + len(labels)
        if end > self.capacity_blocks:
            return
        self.audio[begin * BLOCK_SAMPLES : end * BLOCK_SAMPLES] = torch.from_numpy(audio)
        self.labels[begin:end] = torch.from_numpy(labels)
        starts = torch.from_numpy(begin + np.cumsum(rows[:, 3]) - rows[:, 3])
        self.starts = torch.cat([self.starts, starts.to(self.device, torch.int64)])
        self.num_blocks = end

    def batch(
        self, num_rows: int, num_frames: int, frame_samples: int, start_share: float
    ) -> Batch:
        """Crops with a random gain. `start_share` of them begin where a clip does, as a stream will;
        the others begin anywhere and fade in, so that no crop starts in the middle of a sound."""
        num_samples, device = num_frames * frame_samples, self.device
        last = self.num_blocks - num_samples // BLOCK_SAMPLES - 2
        anywhere = torch.randint(0, last, (num_rows,), device=device)
        clip = torch.randint(0, len(self.starts), (num_rows,), device=device)
        at_start = torch.rand(num_rows, device=device) < start_share
        block = torch.where(at_start, self.starts[clip].clamp(max=last), anywhere)
        offset = torch.arange(num_samples, device=device)
        wav = self.audio[(block * BLOCK_SAMPLES)[:, None] + offset].float() / 32768
        fade = (offset / FADE_IN_SAMPLES).clamp(max=1)
        wav = wav * torch.where(at_start[:, None], torch.ones_like(fade), fade)
        wav = wav * 10 ** ((torch.rand(num_rows, 1, device=device) * 8 - 5) / 20)
        centre = torch.arange(num_frames, device=device) * frame_samples + frame_samples // 2
        return Batch(wav, self.labels[block[:, None] + centre // BLOCK_SAMPLES].long())
