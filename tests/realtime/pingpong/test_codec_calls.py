"""The codec's calls as graphs: the bits of whole clips, and no wait."""

import random

import pytest
import torch

from realtime.pingpong.codec_calls import CodecRunner
from tests.model.test_codec_fused import KERNEL_CONFIG, build, random_codes


def run_alone(codec, codes):
    """[1, N] of codes [T, K], frame by frame."""
    state, row = codec.init_state(1), torch.zeros(1, dtype=torch.int64)
    frames = [codec.decode_stream(frame[None, :, None], state, row) for frame in codes]
    return torch.cat(frames, dim=1)


def random_calls(runner, codes, seed, chunks=(1, 2, 4, 8)):
    """PCM by slot, its frames cut into calls at random and called for in any company, in either lane:
    a call of the slow one is read when the next one is made, others run meanwhile."""
    rng = random.Random(seed)
    num_slots, num_frames = codes.shape[:2]
    pcm = [[] for _ in range(num_slots)]
    put, called = [0] * num_slots, [0] * num_slots
    slow, busy = None, []
    runner.begin(list(range(num_slots)))

    def read(call, slots):
        for s, samples in zip(slots, call.wait(), strict=True):
            pcm[s].append(torch.from_numpy(samples.copy()))
        runner.done(call)

    while min(called) < num_frames or slow is not None:
        is_urgent = rng.random() < 0.7 and min(called) < num_frames
        if not is_urgent and slow is not None:
            read(slow, busy)
            slow, busy = None, []
        rows = [s for s in range(num_slots) if put[s] < num_frames and put[s] - called[s] < 16]
        rows = rng.sample(rows, rng.randint(0, len(rows)))
        if rows:
            frames = torch.stack([codes[s, put[s]] for s in rows])
            runner.put(frames, [runner.place(s, put[s]) for s in rows])
        for s in rows:
            put[s] += 1
        chunk = rng.choice(chunks)
        slots = [s for s in range(num_slots) if put[s] - called[s] >= chunk and s not in busy]
        slots = rng.sample(slots, len(slots))[: runner.max_streams(chunk)]
        if not slots:
            continue
        places = [runner.place(s, called[s] + i) for s in slots for i in range(chunk)]
        call = runner.call(slots, places, chunk, is_urgent=is_urgent)
        for s in slots:
            called[s] += chunk
        if is_urgent:
            read(call, slots)
        else:
            slow, busy = call, slots
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


@torch.inference_mode()
def test_calls_of_the_cpu_give_the_whole_clips_bits():
    codec = build(KERNEL_CONFIG, "cpu")
    codes = torch.stack([random_codes(KERNEL_CONFIG, 12, seed=s)[0].T for s in range(3)])
    runner = CodecRunner(codec, torch.device("cpu"), num_slots=3, frames=(1,))
    want = torch.cat([run_alone(codec, stream) for stream in codes])
    assert torch.equal(random_calls(runner, codes, 1, chunks=(1,)), want)
    with pytest.raises(AssertionError):  # two calls of a stream on their way
        for is_urgent in (False, True):
            runner.call([0], [runner.place(0, 0)], 1, is_urgent=is_urgent)


@pytest.mark.gpu
@torch.inference_mode()
def test_a_stream_begins_again_after_a_slow_call_that_nobody_has_read():
    codec = build(KERNEL_CONFIG, "cuda")
    codes = random_codes(KERNEL_CONFIG, 16, seed=1)[0].T.contiguous().cuda()
    runner = CodecRunner(codec, torch.device("cuda"), num_slots=2)
    runner.capture(iter)
    want = codec.decode(codes[8:].T[None]).cpu()
    for _ in range(20):
        runner.begin([0])
        for frame in range(8):
            runner.put(codes[frame : frame + 1], [runner.place(0, frame)])
        slow = runner.call([0], [runner.place(0, i) for i in range(8)], 8, is_urgent=False)
        runner.begin([0])
        for frame in range(8):
            runner.put(codes[8 + frame : 9 + frame], [runner.place(0, frame)])
        slow.wait()
        runner.done(slow)
        call = runner.call([0], [runner.place(0, i) for i in range(8)], 8)
        assert torch.equal(torch.from_numpy(call.wait().copy()), want)
        runner.done(call)


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
