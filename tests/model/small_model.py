"""A random model of the embedded one's geometry, and how tests run one."""

import torch
from torch import Tensor

from model.config import DualARConfig, StackConfig
from model.dual_ar import DualAR


def embedded_like_config() -> DualARConfig:
    """The geometry of the embedded model: one key/value head, sizes no multiple of each other."""
    slow = StackConfig(3, 320, 5, 1, 64, 832, 1e4, 1e-6, 256, True, False, False)
    fast = StackConfig(2, 320, 5, 1, 64, 640, 1e4, 1e-6, 9, False, False, False)
    return DualARConfig(slow, fast, 1280, 8, 1024, True, 256, 1279, 3)


def make_random_model(dtype: torch.dtype = torch.float32, device: str = "cpu") -> DualAR:
    """The same weights for every dtype and device, up to rounding."""
    model = DualAR(embedded_like_config(), torch.device("cpu"), torch.float32)
    fill_random(model)
    return finished(model, dtype, device)


def fill_random(model: DualAR) -> None:
    generator = torch.Generator().manual_seed(0)
    for weights in model.parameters():
        if weights.ndim == 2:
            weights.copy_(torch.randn(weights.shape, generator=generator) / weights.shape[1] ** 0.5)
        else:
            weights.fill_(1.0)
    model.embeddings.mul_(2.0)


def finished(model: DualAR, dtype: torch.dtype, device: str) -> DualAR:
    model = model.to(device)  # not `to(dtype)`: the RoPE tables are complex
    for weights in model.parameters():
        weights.data = weights.data.to(dtype)
    model.finish_loading()
    return model


def random_prompt(length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.zeros(9, length, dtype=torch.int32)
    rows[0] = torch.randint(20, 150, (length,), generator=generator, dtype=torch.int32)
    codes = torch.randint(0, 1024, (8, length // 2), generator=generator, dtype=torch.int32)
    rows[1:, : length // 2], rows[0, : length // 2] = codes, codes[0] + 256
    return rows


def enter(model, cache, state, slot, prompt, sampling, chunk=None) -> None:
    last = prompt.shape[1] - 1
    for start in range(0, last, chunk or last):
        model.prefill(prompt[:, start : min(last, start + (chunk or last))], cache, slot, start)
    model.join(state, slot, prompt[:, last], last, sampling)


def decode(model, state, slots: list[int], cache, num_frames: int) -> Tensor:
    """[num_frames, B, K]"""
    index = torch.tensor(slots, device=model.device)
    return torch.stack([model.decode_frame(state, index, cache).codes for _ in range(num_frames)])
