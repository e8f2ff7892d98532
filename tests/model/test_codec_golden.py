"""The modded DAC against the reference implementation's numbers (tests/golden/codec)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model.codec import load_codec

GOLDEN = Path(__file__).parents[1] / "golden" / "codec"
TIE_MARGIN = 1e-5  # cosines closer than this may order either way in f32


@pytest.fixture(scope="module")
def codec():
    return load_codec(GOLDEN, "cpu", torch.float32)


@pytest.fixture(scope="module")
def expected():
    return load_file(GOLDEN / "expected.safetensors")


def unexplained_mismatches(codec, wav, got, want):
    """Frames whose first differing codebook was not a tie; what follows a tie may differ freely.

    The reference's choice is followed up to the codebook in question, where both choices' cosines
    with the residual are compared.
    """
    latents = []
    quantizer, encode = codec.quantizer, codec.quantizer.encode
    quantizer.encode = lambda x: latents.append(x) or encode(x)
    codec.encode(wav)
    del quantizer.encode
    residual, bad = torch.cat(latents, dim=1), []
    open_frames = torch.ones(got.shape[2], dtype=torch.bool)
    for k in range(codec.num_codebooks):
        cosines = quantizer.similarity(residual, k)[0]
        for t in torch.nonzero(open_frames & (got[0, k] != want[0, k])).flatten().tolist():
            margin = cosines[t, got[0, k, t].long()] - cosines[t, want[0, k, t].long()]
            if margin > TIE_MARGIN:
                bad.append((t, k, float(margin)))
            open_frames[t] = False
        rows = want[:, k].long() + quantizer.offsets[k]
        residual = residual - quantizer.table[rows]
    return bad


def test_sizes(codec):
    assert (codec.sample_rate, codec.frame_samples, codec.num_codebooks) == (44_100, 2048, 4)
    assert codec.codebook_sizes == (64, 32, 32, 32)


def test_encode(codec, expected):
    wav, want = expected["wav"][None], expected["codes"][None]
    got = codec.encode(wav)
    assert got.dtype == torch.int32 and got.shape == want.shape
    num_different = int((got != want).sum())
    print(f"\nencode: {num_different} of {want.numel()} codes differ")
    assert unexplained_mismatches(codec, wav, got, want) == []


def test_a_wrong_code_is_not_taken_for_a_tie(codec, expected):
    wav, want = expected["wav"][None], expected["codes"][None]
    wrong = want.clone()
    wrong[0, 1, 5] = (wrong[0, 1, 5] + 1) % 32
    assert [(t, k) for t, k, _ in unexplained_mismatches(codec, wav, want, wrong)] == [(5, 1)]


@pytest.mark.parametrize("codes", ["codes", "random_codes"])
def test_decode(codec, expected, codes):
    want = expected[codes.replace("codes", "decoded") if codes != "codes" else "decoded"]
    got = codec.decode(expected[codes][None])[0]
    error = float((got - want).abs().max())
    print(f"\ndecode {codes:12}: max error {error:.1e} of {float(want.abs().max()):.3f}")
    assert got.shape == want.shape and error < 1e-4


def test_decode_frame_by_frame(codec, expected):
    codes, state, rows = expected["random_codes"][None], codec.init_state(1), torch.tensor([0])
    pieces = [codec.decode_stream(frame, state, rows) for frame in codes.split(1, dim=2)]
    error = float((torch.cat(pieces, 1)[0] - expected["random_decoded"]).abs().max())
    print(f"\nstream random_codes: max error {error:.1e}")
    assert error < 1e-4


def test_codes_beyond_a_codebook_are_clamped_in_a_copy(codec):
    codes = torch.tensor([[[-5, 64], [31, 99], [32, 0], [2**31 - 1, -(2**31)]]], dtype=torch.int32)
    before = codes.clone()
    inside = torch.tensor([[[0, 63], [31, 31], [31, 0], [31, 0]]], dtype=torch.int32)
    assert torch.equal(codec.decode(codes), codec.decode(inside))
    assert torch.equal(codes, before)


def test_any_length(codec):
    for num_samples, num_frames in [(0, 0), (1, 1), (2047, 1), (2048, 1), (2049, 2)]:
        assert codec.encode(torch.zeros(2, num_samples)).shape == (2, 4, num_frames)
    assert codec.decode(torch.zeros(2, 4, 0, dtype=torch.int32)).shape == (2, 0)


def test_a_long_clip_is_encoded_in_passes(codec, monkeypatch):
    wav = 0.3 * torch.randn(1, 50 * 2048, generator=torch.Generator().manual_seed(1))
    whole = codec.encode(wav)
    monkeypatch.setattr("model.codec.dac.MAX_PASS_FRAMES", 7)
    assert unexplained_mismatches(codec, wav, codec.encode(wav), whole) == []
