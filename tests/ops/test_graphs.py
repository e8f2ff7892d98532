"""Batch sizes worth a graph, and the set of captured calls."""

import gc

import pytest
import torch

from ops.graphs import Branch, GraphSet, _no_garbage_collection, bucket_sizes


@pytest.mark.parametrize("max_size", [1, 2, 3, 7, 16, 17, 64, 65, 100, 512])
def test_bucket_sizes_ascend_to_the_largest_and_pad_little(max_size):
    sizes = bucket_sizes(max_size)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == max_size
    for num_items in range(1, max_size + 1):
        size = next(size for size in sizes if size >= num_items)
        num_padding = size - num_items
        assert num_padding < num_items, (num_items, size)
        assert num_items <= 16 or num_padding <= size / 3, (num_items, size)


def test_512_slots_need_few_graphs():
    assert len(bucket_sizes(512)) <= 24


def test_without_cuda_a_set_runs_the_call_itself_at_exactly_the_size_wanted():
    calls = []
    graphs = GraphSet(torch.device("cpu"), lambda size: calls.append(size) or size, [1, 2, 4])
    graphs.compile()
    graphs.capture(progress=lambda sizes: pytest.fail("nothing to show"))
    assert graphs.sizes == () and graphs.nbytes == 0 and not calls
    assert graphs.size_for(3) == 3 and graphs(3) == 3 and calls == [3]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_is_left_alone_during_a_capture_only(is_enabled):
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with _no_garbage_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
@torch.inference_mode()
def test_what_has_run_to_be_compiled_does_not_run_again_before_it_is_captured(is_compiled):
    source, sizes = torch.randn(8, 64, device="cuda"), []

    def run(size: int) -> torch.Tensor:
        sizes.append(size)
        return source[:size].sin()

    graphs = GraphSet(torch.device("cuda"), run, [1, 4, 8])
    if is_compiled:
        graphs.compile()
        assert sizes == [8, 4, 1]
    sizes.clear()
    graphs.capture()
    assert sizes == ([8, 8, 4, 1] if is_compiled else [8, 8, 4, 4, 1, 1])
    for size in (1, 4, 8):
        assert torch.equal(graphs(size), source[:size].sin())


@pytest.mark.gpu
@torch.inference_mode()
def test_a_captured_set_replays_what_the_call_does():
    device = torch.device("cuda")
    source = torch.randn(8, 64, device=device)
    weight = torch.randn(64, 64, device=device)

    def run(size: int) -> torch.Tensor:
        return (source[:size] @ weight).sin()

    graphs, shown = GraphSet(device, run, [1, 4, 8]), []
    graphs.capture(lambda sizes: (shown.append(size) or size for size in sizes))
    assert shown == [8, 4, 1] and graphs.sizes == (1, 4, 8) and graphs.nbytes >= 0
    assert [graphs.size_for(n) for n in (1, 2, 4, 5, 8)] == [1, 4, 4, 8, 8]
    for size in (4, 8, 1, 4):
        source.copy_(torch.randn(8, 64, device=device))
        assert torch.equal(graphs(size), run(size))


def test_without_cuda_a_branch_runs_in_its_turn():
    branch, done = Branch(torch.device("cpu")), []
    with branch.begin():
        done.append("beside")
    branch.join()
    assert done == ["beside"]


@pytest.mark.gpu
@torch.inference_mode()
def test_a_captured_branch_follows_what_was_before_it_and_joins():
    """Its copies see what the kernels before it wrote, and are over when the graph is."""
    device = torch.device("cuda")
    branch, source = Branch(device), torch.zeros(1 << 22, device=device)
    copies = [torch.empty(source.shape, pin_memory=True) for _ in range(2)]

    def run(_size: int) -> torch.Tensor:
        kept = []
        for copy in copies:
            kept.append((kept[-1] if kept else source) * 2 + 1)
            with branch.begin():
                copy.copy_(kept[-1], non_blocking=True)
        last = kept[-1].sin()
        branch.join()
        kept.append(last)
        return torch.cat(kept)

    graphs = GraphSet(device, run, [1])
    graphs.capture()
    for value in (3.0, -5.0):
        source.fill_(value)
        graphs(1)
        torch.cuda.synchronize()
        assert [copy.unique().tolist() for copy in copies] == [[2 * value + 1], [4 * value + 3]]
