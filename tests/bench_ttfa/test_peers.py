"""The MLP block of others is the same block, and who cannot be had is told."""

import pytest
import torch

from bench_ttfa import peers
from bench_ttfa.peers import PEERS, Weights, check, reason_of
from ops import reference_fp8


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return Weights(*((torch.randn(n, k) / k**0.5).bfloat16() for n, k in [(512, 128), (128, 256)]))


def rows():
    return torch.randn(4, 128).bfloat16()


def of_definition(x, data, scale):
    """A product in 8 bits as it is defined."""
    return (x.dequantize() @ reference_fp8.dequantize_weight(data, scale).t()).bfloat16()


def test_a_block_of_two_products_is_the_mlp(weights, monkeypatch):
    monkeypatch.setattr(peers, "_compiled", lambda function: function)
    scaled = next(peer for peer in PEERS if peer.name == "scaled_mm")
    x = rows()
    check(scaled, peers._block_scaled(of_definition, weights)(x), weights.exact(x))


def test_plain_torch_and_ours_are_the_mlp(weights):
    x = rows()
    for peer in PEERS[:3]:
        check(peer, peer.make(weights)(x), weights.exact(x))


def test_what_computes_something_else_is_not_timed(weights):
    x = rows()
    with pytest.raises(RuntimeError, match="off by"):
        check(PEERS[0], weights.exact(x) * 1.2, weights.exact(x))
    with pytest.raises(RuntimeError, match="off by nan"):
        check(PEERS[0], weights.exact(x) * torch.nan, weights.exact(x))


def test_a_library_that_is_not_installed_is_a_reason(weights):
    deep_gemm = next(peer for peer in PEERS if peer.name == "DeepGEMM")
    with pytest.raises(ModuleNotFoundError) as caught:
        deep_gemm.make(weights)
    assert reason_of(caught.value) == "ModuleNotFoundError: No module named 'deep_gemm'"
    assert reason_of(RuntimeError("\nfirst\nsecond")) == "RuntimeError: first"
