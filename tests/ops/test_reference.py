"""The plain definitions, each against an even plainer one."""

import math

import pytest
import torch

from ops import reference


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_rounds_before_the_weight():
    x, weight = random(3, 64).bfloat16(), random(64, seed=1).bfloat16()
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    expected = (x.float() * scale).bfloat16() * weight
    assert torch.equal(reference.rms_norm(x, weight, 1e-6), expected)


def test_rope_table_is_rounded_to_bf16():
    table = torch.view_as_real(reference.rope_table(50, 8, 1e4, torch.device("cpu")))
    assert table.shape == (50, 1, 4, 2) and table.dtype == torch.float32
    angle = torch.tensor(49 / 1e4 ** (2 / 8))
    assert table[49, 0, 1, 0] == angle.cos().bfloat16() != angle.cos()
    assert table[49, 0, 1, 1] == angle.sin().bfloat16()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_rotates_neighbours(dtype):
    turns = reference.rope_table(9, 8, 1e4, torch.device("cpu"))[4:7]
    x = random(3, 2, 8).to(dtype)
    got = torch.empty_like(x)
    reference.rope(x, turns, out=got)
    for row, head, pair in [(0, 0, 0), (1, 1, 2), (2, 0, 3)]:
        a, b = x[row, head, 2 * pair : 2 * pair + 2].float()
        turn = turns[row, 0, pair]
        expected = torch.stack([a * turn.real - b * turn.imag, b * turn.real + a * turn.imag])
        torch.testing.assert_close(got[row, head, 2 * pair : 2 * pair + 2], expected.to(dtype))
    in_place = torch.cat([x, x], dim=1)[:, :2]
    reference.rope(in_place, turns, out=in_place)
    assert torch.equal(in_place, got)


@pytest.mark.parametrize("shape", [(448, 320), (1664, 320), (320, 832), (65, 48), (1025, 320)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_gives_a_row_the_same_bits_in_every_batch(shape, dtype):
    weight = random(*shape).to(dtype)
    x, bias = random(17, shape[1], seed=1).to(dtype), random(shape[0], seed=2).to(dtype)
    packed = reference.pack_weight(weight)
    full = reference.linear(x, packed, bias)
    for num_rows in range(1, 17):
        assert torch.equal(reference.linear(x[:num_rows], packed, bias), full[:num_rows])
    order = torch.randperm(17, generator=torch.Generator().manual_seed(3))
    assert torch.equal(reference.linear(x[order], packed, bias), full[order])
    unpacked = reference.linear(x, weight, bias)
    tolerance = 1e-3 if dtype == torch.float32 else 0.3
    torch.testing.assert_close(full, unpacked, atol=tolerance, rtol=1e-2)


def test_swiglu():
    gate_up = random(2, 10)
    gate, up = gate_up[:, :5], gate_up[:, 5:]
    torch.testing.assert_close(reference.swiglu(gate_up), gate * torch.sigmoid(gate) * up)


def naive_attention(q, k, v, num_visible):
    """q [H, D], k and v [H_kv, n, D]."""
    rows = []
    for head in range(q.shape[0]):
        kv_head = head // (q.shape[0] // k.shape[0])
        keys, values = k[kv_head, :num_visible], v[kv_head, :num_visible]
        weights = torch.softmax(keys @ q[head] / math.sqrt(q.shape[1]), dim=0)
        rows.append(weights @ values)
    return torch.stack(rows)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(5, 1), (4, 2), (3, 3)])
def test_attention(num_heads, num_kv_heads):
    k, v = random(2, 3, num_kv_heads, 12, 16)
    q = random(3, num_heads, 16, seed=1)
    lengths = torch.tensor([12, 1, 7])
    masked = reference.grouped_attention(q, k, v, torch.arange(12) < lengths[:, None])
    for row, length in enumerate(lengths.tolist()):
        expected = naive_attention(q[row], k[row], v[row], length)
        torch.testing.assert_close(masked[row], expected)
        cut = [part[row : row + 1, :, :length] for part in (k, v)]
        torch.testing.assert_close(reference.grouped_attention(q[row : row + 1], *cut)[0], expected)


@pytest.mark.parametrize("num_keys", [5, 8])
def test_causal_attention(num_keys):
    q, k, v = random(5, 4, 16), random(2, num_keys, 16, seed=1), random(2, num_keys, 16, seed=2)
    got = reference.causal_attention(q, k, v)
    for row in range(5):
        expected = naive_attention(q[row], k, v, num_keys - 5 + row + 1)
        torch.testing.assert_close(got[row], expected)


def test_embed_rows_scales_semantic_positions_only():
    embeddings, codebooks = random(20, 4), random(3 * 6, 4, seed=1)
    rows = torch.tensor([[3, 12, 15, 16], [0, 2, 5, 0], [0, 1, 0, 0], [0, 5, 3, 0]])
    offsets = torch.arange(3, dtype=torch.int32)[:, None] * 6
    got = reference.embed_rows(rows.int(), embeddings, codebooks, offsets, 10, 15)
    assert torch.equal(got[0], embeddings[3]) and torch.equal(got[3], embeddings[16])
    for position in (1, 2):
        token, codes = rows[0, position], rows[1:, position]
        total = embeddings[token] + sum(codebooks[code + 6 * i] for i, code in enumerate(codes))
        torch.testing.assert_close(got[position], total / 2)


def test_restricted_head_holds_semantic_ids_then_the_end():
    weight = random(20, 4)
    head = reference.restrict_head(weight, 5, 8, 2)
    assert torch.equal(head, weight[[5, 6, 7, 8, 2]])


def mix(x: int) -> int:
    """The mixer on Python integers: shift with sign, wrap to 64 bits."""
    product = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93
    return (product + (1 << 63)) % (1 << 64) - (1 << 63)


def wrap(x: int) -> int:
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def test_gumbel_noise_is_the_documented_hash():
    seeds, frames = [0, 1, -5, (1 << 62) + 3], [0, 7, 1023, 2]
    noise = reference.gumbel_noise(torch.tensor(seeds), torch.tensor(frames), 3, 50)
    assert noise.shape == (4, 3, 50) and noise.dtype == torch.float32
    for row, draw, token in [(0, 0, 0), (1, 2, 49), (2, 1, 17), (3, 0, 5)]:
        stream = mix(wrap(mix(wrap(seeds[row] + 0x9E3779B97F4A7C15)) + frames[row]))
        key = mix(mix(wrap(stream + draw)))
        bits = (mix(mix(wrap(key + token))) >> 41) & 0x7FFFFF
        uniform = (bits + 0.5) * 2.0**-23
        assert noise[row, draw, token] == pytest.approx(-math.log(-math.log(uniform)), abs=1e-4)


def test_uniforms_are_uniform_and_unrelated():
    noise = reference.gumbel_noise(torch.arange(64), torch.zeros(64, dtype=torch.int32), 8, 256)
    uniform = torch.exp(-torch.exp(-noise.double()))
    assert uniform.min() > 0 and uniform.max() < 1 and torch.isfinite(noise).all()
    counts = torch.histc(uniform, 64, 0, 1)
    chi_square = float(((counts - 2048) ** 2 / 2048).sum())
    assert chi_square < 103.4, chi_square  # 63 degrees of freedom, p = 0.001
    centred = uniform - 0.5
    for shifted in (
        centred.roll(1, 0),
        centred.roll(1, 1),
        centred.roll(1, 2),
    ):
        correlation = float((centred * shifted).mean() * 12)
        assert abs(correlation) < 4 / math.sqrt(noise.numel())


# ---------------------------------------------------------------------- prev_tokens_shift_inplace


@pytest.mark.parametrize(("bs", "window", "cw"), [(1, 1, 1), (3, 10, 1), (2, 4, 11)])
def test_shift_drops_the_oldest(bs, window, cw):
    history = torch.arange(bs * (window + 1) * cw, dtype=torch.int32).view(bs, window + 1, cw)
    prev, next_tokens = history[:, :-1].contiguous(), history[:, -1].contiguous()
    address = prev.data_ptr()
    assert reference.prev_tokens_shift_inplace(prev, next_tokens) is None
    assert torch.equal(prev, history[:, 1:]) and prev.data_ptr() == address


def zeros(*shape: int, dtype=torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


_SHARED = zeros(2 * 4 * 3 + 2)

BAD_SHIFTS = {
    "prev dtype": (zeros(2, 4, 3, dtype=torch.int64), zeros(2, 3), "prev: got dtype torch.int64"),
    "next dtype": (zeros(2, 4, 3), zeros(2, 3, dtype=torch.float32), "next_tokens: got dtype"),
    "prev rank": (zeros(4, 3), zeros(4, 3), "prev: got shape .* 3 dimensions"),
    "next rank": (zeros(2, 4, 3), zeros(2, 1, 3), "next_tokens: got shape .* 2 dimensions"),
    "empty window": (zeros(2, 0, 3), zeros(2, 3), "none empty"),
    "batch size": (zeros(2, 4, 3), zeros(1, 3), r"got shape \[1, 3\], expected .*\[2, 3\]"),
    "width": (zeros(2, 4, 3), zeros(2, 4), r"got shape \[2, 4\], expected .*\[2, 3\]"),
    "prev stride": (zeros(4, 2, 3).transpose(0, 1), zeros(2, 3), "prev: got strides"),
    "next stride": (zeros(2, 4, 3), zeros(3, 2).t(), "next_tokens: got strides"),
    "next broadcast": (zeros(2, 4, 3), zeros(1, 3).expand(2, 3), "next_tokens: got strides"),
    "device": (zeros(2, 4, 3), zeros(2, 3).to("meta"), "next_tokens: got device meta"),
    "overlap": (_SHARED[:24].view(2, 4, 3), _SHARED[20:26].view(2, 3), "overlaps prev"),
}


@pytest.mark.parametrize("case", BAD_SHIFTS)
def test_shift_refuses(case):
    prev, next_tokens, message = BAD_SHIFTS[case]
    before = prev.clone()
    with pytest.raises(ValueError, match=message):
        reference.prev_tokens_shift_inplace(prev, next_tokens)
    assert torch.equal(prev, before)
