"""The fused decoder: the same samples as the plain one, on the CPU through the ops' definitions and
on the GPU through their kernels."""

import functools
import math
import random

import pytest
import torch

from model.codec.checkpoint import Weights
from model.codec.config import DacConfig
from model.codec.dac import DacCodec
from model.codec.dac_fused import fits_kernels, has_kernels, pass_sizes
from tests.model.codec_reference import make_tensors, reference_decode

RAW = {
    "sample_rate": 24000, "encoder_dim": 4, "encoder_rates": [2, 4], "decoder_dim": 64,
    "decoder_rates": [4, 2], "latent_dim": 32, "n_codebooks": 2, "codebook_size": 16,
    "semantic_codebook_size": 24, "codebook_dim": 4, "downsample_factor": [2, 2],
    "pre_layers": 1, "post_layers": 2, "tf_heads": 2, "tf_head_dim": 16, "tf_inter": 48,
    "window": 8, "rope_base": 10000.0, "norm_eps": 1e-5,
}  # fmt: skip
CONFIG = DacConfig.from_json(RAW)
# Every kind of layer that the kernels know: slabs of one and of many channel blocks, 96 channels.
KERNEL_CONFIG = DacConfig.from_json(
    RAW
    | {
        "encoder_rates": [8, 4, 2, 2], "decoder_dim": 768, "decoder_rates": [8, 4, 2, 2],
        "latent_dim": 128, "tf_head_dim": 64, "tf_inter": 192, "window": 128,
    }
)  # fmt: skip


@functools.cache
def tensors_of(config):
    return make_tensors(config, seed=3)


def build(config, device="cpu", **kwargs):
    weights = Weights(tensors_of(config), "test", torch.device(device), torch.float32)
    codec = DacCodec(config, weights, **kwargs)
    weights.finish()
    return codec


def random_codes(config, num_frames, seed, num_streams=1):
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.randint(0, size, (num_streams, 1, num_frames), generator=generator, dtype=torch.int32)
        for size in config.codebook_sizes
    ]
    return torch.cat(rows, dim=1)


def snr_db(got, want):
    return -20 * math.log10(float((got - want).norm() / want.norm()) + 1e-12)


def test_passes_are_powers_of_two():
    assert pass_sizes(39) == [16, 16, 4, 2, 1] and pass_sizes(16) == [16] and not pass_sizes(0)


def test_the_s2_codec_fits_the_kernels():
    assert fits_kernels(DacConfig.s2()) and fits_kernels(KERNEL_CONFIG) and not fits_kernels(CONFIG)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_only_hopper_gets_the_kernels(capability, monkeypatch):
    """Others fail to compile them, or lack the shared memory; plain PyTorch runs there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    is_hopper = capability == (9, 0)
    assert has_kernels(torch.device("cuda"), DacConfig.s2()) == is_hopper
    assert not has_kernels(torch.device("cuda"), CONFIG)
    assert not has_kernels(torch.device("cpu"), DacConfig.s2())


@pytest.mark.parametrize("config", [CONFIG, KERNEL_CONFIG], ids=["small", "kernel"])
def test_fused_equals_plain(config):
    codes = random_codes(config, 21, seed=1, num_streams=2)
    want = reference_decode(config, tensors_of(config), codes)
    assert want.abs().max() > 0.05
    assert (build(config, is_fused=True).decode(codes) - want).abs().max() < 1e-5


def check_schedule(codec, config, tolerance):
    """Streams join, pause and begin again in any slot, in batches of any order and size."""
    device, num_slots, num_frames = codec.device, 5, 24
    state = codec.init_state(num_slots)
    clips = [random_codes(config, num_frames, seed=s).to(device) for s in range(num_slots)]
    whole = [codec.decode(clip)[0] for clip in clips]
    rng, owner, done, worst = random.Random(0), list(range(num_slots)), [0] * num_slots, 0.0
    for _ in range(40):
        if rng.random() < 0.2:
            slots = rng.sample(range(num_slots), 2)
            codec.reset_state(state, torch.tensor(slots, device=device))
            for slot in slots:
                owner[slot], done[slot] = rng.randrange(num_slots), 0
        size = rng.choice([1, 1, 2, 3, 4, 8])
        slots = [s for s in range(num_slots) if done[s] + size <= num_frames]
        if not slots:
            continue
        slots = rng.sample(slots, rng.randint(1, len(slots)))
        batch = torch.cat([clips[owner[s]][:, :, done[s] : done[s] + size] for s in slots])
        wav = codec.decode_stream(batch, state, torch.tensor(slots, device=device))
        for row, slot in enumerate(slots):
            start = done[slot] * codec.frame_samples
            want = whole[owner[slot]][start : start + wav.shape[1]]
            worst = max(worst, float((wav[row] - want).abs().max()))
            done[slot] += size
    assert worst <= tolerance, worst


def test_streams_equal_whole_clips():
    check_schedule(build(CONFIG, is_fused=True), CONFIG, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [KERNEL_CONFIG, DacConfig.s2()], ids=["kernel", "s2"])
def test_kernels_equal_plain(config):
    codes = random_codes(config, 21, seed=1, num_streams=3).cuda()
    want = build(config, "cuda", is_fused=False).decode(codes)
    got = build(config, "cuda").decode(codes)
    print(f"\nSNR against fp32: {snr_db(got, want):.1f} dB")
    assert want.abs().max() > 0.05 and snr_db(got, want) > 40


@pytest.mark.gpu
@pytest.mark.parametrize("config", [KERNEL_CONFIG, DacConfig.s2()], ids=["kernel", "s2"])
def test_streams_equal_whole_clips_bit_for_bit_on_the_gpu(config):
    check_schedule(build(config, "cuda"), config, 0.0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_call_never_waits_and_can_be_captured():
    codec = build(KERNEL_CONFIG, "cuda")
    codes, rows = random_codes(KERNEL_CONFIG, 4, 1, 2).cuda(), torch.tensor([2, 0]).cuda()
    state, twin = codec.init_state(3), codec.init_state(3)
    codec.decode_stream(codes, state, rows)
    codec.reset_state(state, torch.arange(3).cuda())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            wav = codec.decode_stream(codes, state, rows)
        for _ in range(3):
            graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(3):
        want = codec.decode_stream(codes, twin, rows)
    assert torch.equal(wav, want)
    assert torch.equal(state.history, twin.history) and state.positions.tolist() == [12, 0, 12]
