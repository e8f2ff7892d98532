"""Streaming decode: any split, any batch, any row order gives the whole clip's samples."""

import random

import pytest
import torch
from torch.nn import functional as F

from model.codec.checkpoint import Weights
from model.codec.config import DacConfig
from model.codec.dac import DacCodec
from tests.model.codec_reference import make_tensors, reference_decode

WINDOW = 8
CONFIG = DacConfig.from_json(
    {
        "sample_rate": 24000, "encoder_dim": 4, "encoder_rates": [2, 3], "decoder_dim": 32,
        "decoder_rates": [3, 2], "latent_dim": 32, "n_codebooks": 2, "codebook_size": 16,
        "semantic_codebook_size": 24, "codebook_dim": 4, "downsample_factor": [2, 2],
        "pre_layers": 1, "post_layers": 2, "tf_heads": 2, "tf_head_dim": 16, "tf_inter": 48,
        "window": WINDOW, "rope_base": 10000.0, "norm_eps": 1e-5,
    }
)  # fmt: skip
TENSORS = make_tensors(CONFIG, seed=3)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def codec():
    weights = Weights(TENSORS, "test", torch.device("cpu"), torch.float32)
    codec = DacCodec(CONFIG, weights)
    weights.finish()
    return codec


def random_codes(num_frames, seed, num_streams=1):
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.randint(0, size, (num_streams, 1, num_frames), generator=generator, dtype=torch.int32)
        for size in CONFIG.codebook_sizes
    ]
    return torch.cat(rows, dim=1)


def stream(codec, codes, sizes):
    state, rows = codec.init_state(1), torch.tensor([0])
    return torch.cat([codec.decode_stream(c, state, rows) for c in codes.split(sizes, dim=2)], 1)


def test_whole_clip_equals_plain_convolutions(codec):
    """The oracle: conv1d, conv_transpose1d and full-length attention, with no state at all."""
    codes = random_codes(5 * WINDOW, seed=0, num_streams=2)
    want = reference_decode(CONFIG, TENSORS, codes)
    assert want.abs().max() > 0.05
    assert (codec.decode(codes) - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("size", [1, 2, 3, 7, WINDOW, 16, 17, 40])
def test_equal_splits(codec, size):
    codes = random_codes(5 * WINDOW, seed=1)
    error = (stream(codec, codes, size) - codec.decode(codes)).abs().max()
    print(f"\nsplits of {size}: max error {float(error):.1e}")
    assert error < TOLERANCE


def test_random_splits(codec):
    rng = random.Random(0)
    codes = random_codes(6 * WINDOW, seed=2)
    whole = codec.decode(codes)
    for _ in range(8):
        sizes, left = [], codes.shape[2]
        while left:
            sizes.append(min(left, rng.choice([1, 1, 2, 5, 11, 23])))
            left -= sizes[-1]
        assert (stream(codec, codes, sizes) - whole).abs().max() < TOLERANCE, sizes


def test_a_prefix_needs_no_future(codec):
    codes = random_codes(30, seed=3)
    changed = codes.clone()
    changed[:, :, 20:] = random_codes(10, seed=99)
    samples = 20 * codec.frame_samples
    assert torch.equal(codec.decode(codes)[:, :samples], codec.decode(changed)[:, :samples])


@pytest.mark.parametrize("seed", range(4))
def test_random_schedule(codec, seed):
    """Streams join, pause, end and begin again in any slot, in batches of any order and size."""
    rng = random.Random(seed)
    num_slots, num_frames = 5, 3 * WINDOW
    state = codec.init_state(num_slots)
    clips = [random_codes(num_frames, seed=10 * seed + s) for s in range(num_slots)]
    whole = [codec.decode(clip)[0] for clip in clips]
    owner, done = list(range(num_slots)), [0] * num_slots  # slot -> clip, frames decoded
    num_checked = 0
    for _ in range(60):
        if rng.random() < 0.2:
            slots = rng.sample(range(num_slots), rng.randint(1, num_slots))
            codec.reset_state(state, torch.tensor(slots))
            for slot in slots:
                owner[slot], done[slot] = rng.randrange(num_slots), 0
        size = rng.choice([1, 1, 1, 2, 5])
        slots = [s for s in range(num_slots) if done[s] + size <= num_frames]
        slots = rng.sample(slots, rng.randint(0, len(slots)))
        if not slots:
            continue
        batch = torch.cat([clips[owner[s]][:, :, done[s] : done[s] + size] for s in slots])
        wav = codec.decode_stream(batch, state, torch.tensor(slots))
        for row, slot in enumerate(slots):
            start = done[slot] * codec.frame_samples
            want = whole[owner[slot]][start : start + wav.shape[1]]
            assert (wav[row] - want).abs().max() < TOLERANCE, (slot, done[slot])
            done[slot] += size
            num_checked += size
    assert num_checked > 100
    assert state.positions.tolist() == done


def test_other_streams_do_not_change_the_bits(codec):
    clips = random_codes(20, seed=5, num_streams=3)
    alone = [stream(codec, clip[None], 1)[0] for clip in clips]
    state, rows = codec.init_state(4), torch.tensor([2, 0, 3])
    together = torch.cat(
        [codec.decode_stream(frame, state, rows) for frame in clips.split(1, dim=2)], dim=1
    )
    is_exact = codec.decoder.conv_in.product.is_row_exact
    for row in range(3):
        error = float((together[row] - alone[row]).abs().max())
        assert error == 0 if is_exact else error < 1e-6, (row, error)


def test_rows_that_are_not_named_stay_as_they_are(codec):
    state = codec.init_state(3)
    codec.decode_stream(random_codes(4, 0, 3), state, torch.arange(3))
    before = [state.positions[1].clone(), state.history[1].clone(), state.ring.keys[1].clone()]
    codec.decode_stream(random_codes(2, 1, 2), state, torch.tensor([2, 0]))
    codec.reset_state(state, torch.tensor([0, 2]))
    after = [state.positions[1], state.history[1], state.ring.keys[1]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_state_is_fixed_size_and_slot_major(codec):
    state = codec.init_state(3)
    tensors = [state.positions, state.history, state.ring.keys, state.ring.values]
    pointers = [t.data_ptr() for t in tensors]
    codec.decode_stream(random_codes(20, 0, 2), state, torch.tensor([2, 0]))
    codec.reset_state(state, torch.tensor([1]))
    assert [t.data_ptr() for t in tensors] == pointers
    assert all(len(t) == 3 for t in tensors)


def test_far_positions_keep_their_own_rope(codec):
    """Positions are absolute: a stream that has run for hours goes on exactly."""
    clip = random_codes(12, seed=6)
    state, rows = codec.init_state(2), torch.tensor([0, 1])
    state.positions[:] = torch.tensor([10_000_000, 3])
    wav = codec.decode_stream(clip.repeat(2, 1, 1), state, rows)
    assert torch.isfinite(wav).all()
    assert state.positions.tolist() == [10_000_012, 15]


def test_bf16_runs_and_stays_close(codec):
    weights = Weights(TENSORS, "test", torch.device("cpu"), torch.bfloat16)
    low = DacCodec(CONFIG, weights)
    codes = random_codes(20, seed=7)
    want, got = codec.decode(codes), low.decode(codes)
    assert got.dtype == torch.float32
    assert F.cosine_similarity(got, want, dim=1).item() > 0.98
