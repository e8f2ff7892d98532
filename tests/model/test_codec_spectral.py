"""The spectral codec: exact streaming, state by rows, lengths, and refused configs."""

import pytest
import torch
from torch import Tensor

from model.codec.spectral import REFERENCE_DBFS, SpectralCodec, SpectralConfig, to_level

SMALL = SpectralConfig(
    mel_views=((960, 20), (240, 8)),
    encoder_dim=16,
    encoder_hidden_dim=24,
    encoder_blocks=1,
    dim=16,
    num_heads=2,
    ffn_dim=24,
    attention_frames=5,
    decoder_dim=24,
    decoder_hidden_dim=32,
    decoder_blocks=2,
    num_codebooks=3,
    codebook_size=32,
    codebook_dim=4,
)


def make_codec(config: SpectralConfig) -> SpectralCodec:
    torch.manual_seed(0)
    codec = SpectralCodec(config).eval()
    with torch.no_grad():
        for parameter in codec.parameters():  # every norm, bias and scale takes part
            parameter.add_(0.05 * torch.randn_like(parameter))
    return codec


def make_codes(codec: SpectralCodec, num_rows: int, num_frames: int) -> Tensor:
    shape = (num_rows, codec.num_codebooks, num_frames)
    return torch.randint(0, codec.codebook_sizes[0], shape, dtype=torch.int32)


@pytest.mark.parametrize("split", [[1] * 23, [2] * 11 + [1], [7, 1, 12, 3], [23], [9, 9, 5]])
@pytest.mark.parametrize("config", [SMALL, SpectralConfig()], ids=["small", "full"])
def test_streaming_in_any_split_equals_whole_decode(
    config: SpectralConfig, split: list[int]
) -> None:
    codec = make_codec(config)
    codes = make_codes(codec, 2, sum(split))
    whole = codec.decode(codes)
    state, rows = codec.init_state(2), torch.tensor([0, 1])
    parts = [codec.decode_stream(part, state, rows) for part in codes.split(split, dim=2)]
    assert [part.shape[1] for part in parts] == [960 * n for n in split]
    assert whole.abs().max() > 1e-3  # not silence
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=0)


def test_streams_longer_than_the_window_and_prefixes_agree() -> None:
    codec = make_codec(SMALL)
    codes = make_codes(codec, 1, 60)
    whole, prefix = codec.decode(codes), codec.decode(codes[:, :, :31])
    torch.testing.assert_close(whole[:, : prefix.shape[1]], prefix, atol=1e-5, rtol=0)
    state = codec.init_state(1)
    parts = [codec.decode_stream(c, state, torch.tensor([0])) for c in codes.split(1, dim=2)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=0)


def test_rows_at_different_positions_in_any_order() -> None:
    codec = make_codec(SMALL)
    codes = make_codes(codec, 3, 20)
    state = codec.init_state(5)
    slots = [4, 0, 2]
    got: list[list[Tensor]] = [[], [], []]
    position = [0, 0, 0]
    for active, step in [([0], 3), ([1, 0], 2), ([2, 0, 1], 4), ([2], 1), ([1, 2], 5)]:
        rows = torch.tensor([slots[s] for s in active])
        batch = torch.stack([codes[s, :, position[s] : position[s] + step] for s in active])
        for s, wav in zip(active, codec.decode_stream(batch, state, rows), strict=True):
            got[s].append(wav)
            position[s] += step
    for s in range(3):
        want = codec.decode(codes[s : s + 1, :, : position[s]])[0]
        torch.testing.assert_close(torch.cat(got[s]), want, atol=1e-5, rtol=0)
    untouched = codec.init_state(5)
    for name, tensor in state.items():
        assert torch.equal(tensor[1], untouched[name][1]), name


def test_reset_starts_only_the_named_rows_again() -> None:
    codec = make_codec(SMALL)
    codes = make_codes(codec, 2, 12)
    state, both = codec.init_state(2), torch.tensor([0, 1])
    codec.decode_stream(codes[:, :, :6], state, both)
    codec.reset_state(state, torch.tensor([1]))
    first = codec.decode_stream(codes[:1, :, 6:], state, torch.tensor([0]))
    second = codec.decode_stream(codes[1:, :, :6], state, torch.tensor([1]))
    torch.testing.assert_close(first, codec.decode(codes[:1])[:, 6 * 960 :], atol=1e-5, rtol=0)
    torch.testing.assert_close(second, codec.decode(codes[1:, :, :6]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_samples", [1, 959, 960, 961, 24000, 24001])
def test_encode_gives_a_frame_per_started_960_samples(num_samples: int) -> None:
    codec = make_codec(SMALL)
    codes = codec.encode(0.1 * torch.randn(2, num_samples))
    assert codes.shape == (2, 3, -(-num_samples // 960)) and codes.dtype == torch.int32
    assert codes.min() >= 0 and codes.max() < 32
    assert codec.decode(codes).shape == (2, codes.shape[2] * 960)


def speech(level: float) -> Tensor:
    """Two bursts with a pause between them: f32 [1, 24,000]"""
    t = torch.arange(24_000) / 24_000
    return (level * torch.sin(2 * torch.pi * 200 * t) * (torch.sin(4 * torch.pi * t) > 0))[None]


@pytest.mark.parametrize("level", [1e-3, 0.1, 0.9])
def test_a_reference_is_encoded_alike_at_every_level(level: float) -> None:
    codec = make_codec(SMALL)
    at_level = to_level(speech(level), 480, REFERENCE_DBFS)
    sounding = at_level[:, :6_000].square().mean().sqrt()
    assert float(20 * sounding.log10()) == pytest.approx(REFERENCE_DBFS, abs=0.2)
    codes = codec.encode_reference(speech(level))
    assert torch.equal(codes, codec.encode(at_level))
    assert torch.equal(codes, codec.encode_reference(speech(0.2)))


def test_a_level_keeps_peaks_within_full_scale_and_silence_silent() -> None:
    spiky = 1e-3 * torch.randn(2, 24_000, generator=torch.Generator().manual_seed(0))
    spiky[0, 5_000] = 0.5
    spiky[1] = 0
    at_level = to_level(spiky, 480, 0.0)
    assert float(at_level[0].abs().max()) == pytest.approx(1.0)
    assert float(at_level[1].abs().max()) == 0.0


def test_fused_weights_follow_a_new_state_dict() -> None:
    codec, other = make_codec(SMALL), SpectralCodec(SMALL).eval()
    codes, row = make_codes(codec, 1, 4), torch.tensor([0])
    codec.decode_stream(codes, codec.init_state(1), row)
    codec.load_state_dict(other.state_dict())
    got = codec.decode_stream(codes, codec.init_state(1), row)
    torch.testing.assert_close(got, other.decode(codes), atol=1e-5, rtol=0)


def test_arithmetic_stays_in_fp32() -> None:
    codec = make_codec(SMALL)
    codes = make_codes(codec, 1, 2)
    want = codec.decode(codes)
    torch.testing.assert_close(codec.to(torch.bfloat16).decode(codes), want, atol=0.1, rtol=0.1)
    assert codec.decode(codes).dtype == torch.float32


def test_config_refuses_what_it_does_not_know() -> None:
    assert SpectralConfig.from_dict({"type": "spectral", "mel_views": [[960, 20]]}).mel_views == (
        (960, 20),
    )
    with pytest.raises(ValueError, match="kernal"):
        SpectralConfig.from_dict({"type": "spectral", "kernal": 7})
    with pytest.raises(ValueError, match="dac"):
        SpectralConfig.from_dict({"type": "dac"})


def test_size_is_within_the_embedded_budget() -> None:
    num_parameters = sum(p.numel() for p in SpectralCodec(SpectralConfig()).parameters())
    assert num_parameters <= 7_270_000


@pytest.mark.parametrize("config", [SMALL, SpectralConfig()], ids=["small", "full"])
def test_other_streams_do_not_change_the_bits(config: SpectralConfig) -> None:
    codec = make_codec(config)
    codes = make_codes(codec, 4, 30)

    def play(rows: list[int]) -> Tensor:
        state, slots = codec.init_state(6), torch.tensor([5 - row for row in rows])
        frames = [codec.decode_stream(f, state, slots) for f in codes[rows].split(1, dim=2)]
        return torch.cat(frames, dim=1)

    together = play([0, 1, 2, 3])
    for row in range(4):
        alone = play([row])[0]
        assert codec._fused is not None
        if codec._fused.head.is_row_exact:
            assert torch.equal(together[row], alone), float((together[row] - alone).abs().max())
        else:
            torch.testing.assert_close(together[row], alone, atol=1e-6, rtol=0)
