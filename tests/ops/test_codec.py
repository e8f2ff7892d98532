"""The codec's ops: packing, choice of tiles, every source for every architecture."""

import pytest
import torch
from torch.nn import functional as F

from ops import codec_conv as codec
from ops import codec_unit as units
from tests.ops.compiling import check_compiles


def random_layer(channels, columns, num_taps, dilation, **kwargs):
    weight = torch.randn(columns, num_taps, channels) / (num_taps * channels) ** 0.5
    bias = torch.randn(columns)
    return weight, codec.pack_conv(weight, bias, torch.float32, dilation=dilation, **kwargs)


@pytest.mark.parametrize(
    ("channels", "columns", "num_taps", "dilation"),
    [(16, 24, 7, 3), (96, 8, 7, 9), (128, 32, 2, 1)],
)
def test_conv_is_a_causal_convolution(channels, columns, num_taps, dilation):
    weight, layer = random_layer(channels, columns, num_taps, dilation)
    num_values, steps = layer.num_past * channels, 5
    history = torch.randn(3, num_values)
    streams = codec.Streams(torch.tensor([2, 0]), history, torch.full((2, num_values), torch.nan))
    x = torch.randn(2 * steps, channels)
    out = codec.conv(x, layer, streams, num_steps=steps).out
    past = history[[2, 0]].view(2, layer.num_past, channels)
    padded = torch.cat([past, x.view(2, steps, channels)], dim=1)
    want = F.conv1d(
        padded.transpose(1, 2), weight.transpose(1, 2).contiguous(), layer.bias, dilation=dilation
    )
    assert out is not None
    torch.testing.assert_close(out.view(2, steps, -1), want.transpose(1, 2))
    assert torch.equal(streams.new_history, padded[:, steps:].flatten(1))


def test_residual_comes_before_the_activation_and_raw_is_what_it_sees():
    _, layer = random_layer(32, 48, 1, 1, activation="snake", alpha=torch.rand(48) + 0.5)
    x, residual = torch.randn(7, 32), torch.randn(7, 48)
    raw, out = codec.conv(x, layer, residual=residual, raw=torch.float32)
    plain = F.linear(x, layer.weight[:, :32], layer.bias) + residual
    assert raw is not None and out is not None and layer.alpha is not None
    torch.testing.assert_close(raw, plain)
    torch.testing.assert_close(out, plain + (layer.alpha * plain).sin() ** 2 / layer.alpha)


def test_unit_is_its_layers_one_after_the_other():
    channels, dilation, steps = 96, 3, 7
    conv7, conv1 = torch.randn(channels, 7, channels) / 26, torch.randn(channels, channels) / 10
    bias7, bias1 = torch.randn(2, channels)
    before, between, after = (units.Snake.of(torch.rand(channels) + 0.5) for _ in range(3))
    unit = units.Unit(
        units.unit_weight(conv7, conv1, torch.float32), bias7, bias1, before, between, after,
        dilation, history_start=0,
    )  # fmt: skip
    history = torch.randn(3, unit.num_past * channels)
    streams = codec.Streams(torch.tensor([2, 0]), history, torch.empty(2, history.shape[1]))
    x = torch.randn(2 * steps, channels)
    past = history[[2, 0]].view(2, unit.num_past, channels)
    padded = torch.cat([past, x.view(2, steps, channels)], dim=1)
    y = F.conv1d(before(padded).transpose(1, 2), conv7.transpose(1, 2), bias7, dilation=dilation)
    y = F.linear(between(y.transpose(1, 2).flatten(0, 1)), conv1, bias1)
    torch.testing.assert_close(units.unit(x, unit, streams, steps), after(y + x))
    assert torch.equal(streams.new_history, padded[:, steps:].flatten(1))


def test_long_sums_of_few_columns_are_split_whatever_the_rows():
    assert random_layer(1024, 1024, 7, 1)[1].num_splits == 4
    assert random_layer(1024, 8192, 7, 1)[1].num_splits == 1
    assert random_layer(384, 384, 7, 1)[1].num_splits == 1


def test_sizes_that_no_block_of_channels_fits_are_refused():
    with pytest.raises(AssertionError, match="144"):
        codec.channel_block(144)


def test_large_tiles_only_when_they_fill_the_device():
    _, layer = random_layer(96, 96, 7, 1)
    assert codec.tile_for(64 * 2048, layer).rows > codec.tile_for(4, layer).rows


def test_few_rows_of_one_tap_have_a_kernel_of_their_own():
    _, layer = random_layer(1024, 3072, 1, 1)
    assert codec.is_linear(1, layer) and codec.is_linear(64, layer)
    assert not codec.is_linear(256, layer)
    _, split = random_layer(3072, 1024, 1, 1)
    assert codec.is_linear(32, split) and not codec.is_linear(64, split)
    assert not codec.is_linear(1, random_layer(1024, 1024, 7, 1)[1])
    assert not codec.is_linear(1, random_layer(96, 96, 1, 1)[1])  # not in pieces of 64 channels


def test_two_ctas_of_the_linear_share_an_sm_where_one_each_is_not_enough():
    _, layer = random_layer(1024, 3072, 1, 1)
    assert codec.linear_stages(8, layer) == codec.linear_stages(64, layer) == 16
    assert codec.is_linear(128, layer) and codec.linear_stages(128, layer) == 8


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [9, 64, 100, 128])
def test_stages_of_the_linear_change_no_bit(rows, monkeypatch):
    generator = torch.Generator("cuda").manual_seed(rows)
    x, weight = (torch.randn(n, 1024, device="cuda", generator=generator) for n in (rows, 3072))
    layer = codec.pack_conv(weight[:, None] / 32, None, torch.float16)
    made = []
    for stages in (16, 8, 3):
        monkeypatch.setattr(codec, "linear_stages", lambda _rows, _layer, held=stages: held)
        made.append(codec.conv(x.half(), layer).out)
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
    torch.testing.assert_close(made[0].float(), x @ weight.T / 32, atol=0.02, rtol=0.02)


def test_pieces_of_weights_are_swizzled_as_the_tensor_cores_read_them():
    weight = torch.arange(40 * 128.0).view(40, 128)
    pieces = codec._tiles(weight)
    assert pieces.shape == (2, 2, 32, 64)
    for row, product in ((0, 0), (5, 70), (33, 127), (39, 64)):
        chunk, within = product % 64 // 8, product % 8
        place = (chunk ^ row % 8) * 8 + within
        assert pieces[product // 64, row // 32, row % 32, place] == weight[row, product]
    assert not pieces[:, 1, 8:].any()


def test_kernels_compile():
    convs = [codec.defines_of(tile, block) for tile in codec.TILES for block in (64, 96)]
    linears = [{"ROWS": rows, "STAGES": stages} for rows, stages in ((8, 16), (64, 16), (64, 8))]
    tiles = [(units.unit_tile(rows, n), n) for n in units.CHANNELS for rows in (1, 1 << 20)]
    check_compiles(
        [
            *(("codec_conv.cu", defines) for defines in convs),
            *(("codec_linear.cu", defines) for defines in linears),
            *(("codec_unit.cu", codec.defines_of(t, codec.channel_block(n))) for t, n in tiles),
            ("codec_stream.cu", {}),
        ],
        ("sm_90a", "sm_100a", "sm_120a"),
    )
