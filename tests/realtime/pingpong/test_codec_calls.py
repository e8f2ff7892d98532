"""The codec's calls as graphs: the bits of whole clips, and no wait."""

import random

import pytest
import torch

from realtime.pingpong.codec_calls import CodecRunner
from tests.model.test_codec_fused import KERNEL_CONFIG, build, random_codes


def random_calls(runner, codes, seed):
    """PCM by slot, its frames cut into calls at random and called for in any company."""
    rng = random.Random(seed)
    num_slots, num_frames = codes.shape[:2]
    pcm = [[] for _ in range(num_slots)]
    put, called = [0] * num_slots, [0] * num_slots
    runner.begin(list(range(num_slots)))
    while min(called) < num_frames:
        rows = [s for s in range(num_slots) if put[s] < num_frames and put[s] - called[s] < 16]
        rows = rng.sample(rows, rng.randint(0, len(rows)))
        if rows:
            frames = torch.stack([codes[s, put[s]] for s in rows])
            runner.put(frames, [runner.place(s, put[s]) for s in rows])
        for s in rows:
            put[s] += 1
        chunk = rng.choice([1, 2, 4, 8])
        slots = [s for s in range(num_slots) if put[s] - called[s] >= chunk]
        slots = rng.sample(slots, len(slots))[: runner.max_streams(chunk)]
        if not slots:
            continue
        places = [runner.place(s, called[s] + i) for s in slots for i in range(chunk)]
        call = runner.call(slots, places, chunk)
        for s, samples in zip(slots, call.wait(), strict=True):
            pcm[s].append(torch.from_numpy(samples.copy()))
            called[s] += chunk
        runner.done(call)
    return torch.stack([torch.cat(pieces) for pieces in pcm])


@pytest.mark.gpu
@torch.inference_mode()
def test_graphs_give_the_whole_clips_bits_whatever_the_calls():
    codec = build(KERNEL_CONFIG, "cuda")
    codes = torch.stack([random_codes(KERNEL_CONFIG, 40, seed=s)[0].T for s in range(6)]).cuda()
    want = codec.decode(codes.transpose(1, 2)).cpu()
    for is_captured in (False, True):
        runner = CodecRunner(codec, torch.device("cuda"), num_slots=6)
        if is_captured:
            runner.capture(iter)
            assert runner.graph_bytes > 0
        for seed in range(3):
            assert torch.equal(random_calls(runner, codes, seed), want), (is_captured, seed)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@torch.inference_mode()
def test_a_call_waits_for_nothing():
    codec = build(KERNEL_CONFIG, "cuda")
    runner = CodecRunner(codec, torch.device("cuda"), num_slots=4)
    runner.capture(iter)
    codes = random_codes(KERNEL_CONFIG, 2, seed=1)[0].T.contiguous().cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.begin([2, 0])
        runner.put(codes, [runner.place(2, 0), runner.place(0, 0)])
        call = runner.call([2, 0], [runner.place(2, 0), runner.place(0, 0)], 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert abs(call.wait()).max() > 0
