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


def s2_like_config(num_layers: int = 3) -> DualARConfig:
    """S2 Pro's widths with fewer layers and words."""
    shape = (2560, 32, 8, 128, 9728, 1e6, 1e-6)
    slow = StackConfig(num_layers, *shape, 2048, True, False, False)
    fast = StackConfig(2, *shape, 11, False, False, False)
    return DualARConfig(slow, fast, 8192, 10, 4096, True, 4000, 8095, 3)


def make_random_model(dtype: torch.dtype = torch.float32, device: str = "cpu") -> DualAR:
    model = DualAR(embedded_like_config(), torch.device(device), dtype)
    fill_random(model)
    model.finish_loading()
    return model


def fill_random(model: DualAR) -> None:
    """The same numbers at every call on one kind of device; no finishing."""
    generator = torch.Generator(model.device).manual_seed(0)
    for weights in model.parameters():
        if weights.ndim == 2:
            weights.normal_(0, weights.shape[1] ** -0.5, generator=generator)
        else:
            weights.fill_(1.0)
    model.embeddings.mul_(2.0)


def random_prompt(length: int, seed: int, config: DualARConfig | None = None) -> Tensor:
    """i32 [1+K, length]: half of it codes, then words."""
    config = config or embedded_like_config()
    begin, num_codebooks = config.semantic_begin_id, config.num_codebooks
    generator = torch.Generator().manual_seed(seed)
    rows = torch.zeros(1 + num_codebooks, length, dtype=torch.int32)
    rows[0] = torch.randint(20, 150, (length,), generator=generator, dtype=torch.int32)
    shape = (num_codebooks, length // 2)
    codes = torch.randint(0, config.num_semantic, shape, generator=generator, dtype=torch.int32)
    rows[1:, : length // 2], rows[0, : length // 2] = codes, codes[0] + begin
    return rows


def enter(model, cache, state, slot, prompt, sampling, chunk=None) -> None:
    last, prompt = prompt.shape[1] - 1, prompt.to(model.device)
    for start in range(0, last, chunk or last):
        model.prefill(prompt[:, start : min(last, start + (chunk or last))], cache, slot, start)
    model.join(state, slot, prompt[:, last], last, sampling)


def decode(model, state, slots: list[int], cache, num_frames: int) -> Tensor:
    """[num_frames, B, K]"""
    index = torch.tensor(slots, device=model.device)
    return torch.stack([model.decode_frame(state, index, cache).codes for _ in range(num_frames)])
