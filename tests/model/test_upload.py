"""Checkpoints are read in pieces; every value arrives where it belongs, whatever the pieces."""

import pytest
import torch

from model import upload
from model.dual_ar import DualAR
from model.loader import load_dual_ar
from model.random_checkpoint import write_checkpoint
from model.random_model import RandomModel
from model.tensor_files import Entry, data_offsets, row_slices, write_file
from model.upload import Stored, Transfer, _pieces, _read
from tests.model.goldens import END_ID, GOLDEN


@pytest.fixture
def stored(tmp_path) -> tuple[Stored, torch.Tensor]:
    """The second tensor of a file."""
    file = tmp_path / "a.safetensors"
    values = torch.randn(60, 40).bfloat16()
    entries = [Entry("a", torch.float32, (3,)), Entry("b", torch.bfloat16, (60, 40))]
    data = {"a": torch.ones(3), "b": values}
    write_file(file, entries, lambda entry: [data[entry.name]], {})
    return Stored(values, file, data_offsets(file)["b"]), values


@pytest.mark.parametrize("piece_bytes", [64, 1024, 4798, 1 << 20])
def test_the_pieces_are_the_whole(monkeypatch, stored, piece_bytes):
    monkeypatch.setattr(upload, "PIECE_BYTES", piece_bytes)
    source, values = stored
    target, buffer = torch.zeros(60, 40).bfloat16(), torch.zeros(1 << 20, dtype=torch.uint8)
    with source.file.open("rb") as stream:
        for piece in _pieces([Transfer(source, target)]):
            _read(stream.fileno(), piece, buffer)
            piece.target.copy_(buffer[: piece.num_bytes].view(piece.dtype))
            assert piece.num_bytes <= max(piece_bytes, 2)
    assert torch.equal(target, values)


def test_a_file_that_shrinks_is_named(stored):
    source, values = stored
    (piece,) = _pieces([Transfer(source, values.clone())])
    with source.file.open("r+b") as stream:
        stream.truncate(source.offset + 10)
        with pytest.raises(OSError, match=r"a\.safetensors: ends early"):
            _read(stream.fileno(), piece, torch.zeros(1 << 20, dtype=torch.uint8))


def test_progress_adds_up_to_the_file():
    seen: list[int] = []
    model = load_dual_ar(GOLDEN / "dual_ar_long", "cpu", torch.float32, on_bytes=seen.append)
    assert model.config.end_id == END_ID
    file = GOLDEN / "dual_ar_long" / "model.safetensors"
    assert 0.95 < sum(seen) / file.stat().st_size < 1.0


@pytest.mark.parametrize("multiple", [1, 128])
def test_row_slices(monkeypatch, multiple):
    monkeypatch.setattr("model.tensor_files.PIECE_BYTES", 1000)
    slices = list(row_slices((300, 10), 2, multiple))
    assert slices[0].start == 0 and slices[-1].stop == 300
    assert all(a.stop == b.start for a, b in zip(slices, slices[1:], strict=False))
    assert all(part.start % multiple == 0 for part in slices)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_gets_the_same_weights(monkeypatch, tmp_path, dtype):
    """bf16 files with many pieces, f32 too (converted), broadcast vectors."""
    monkeypatch.setattr(upload, "PIECE_BYTES", 30_000)
    write_checkpoint(RandomModel("tiny"), tmp_path)
    for path in (tmp_path, GOLDEN / "dual_ar_projected"):
        host = load_dual_ar(path, "cpu", dtype)
        model = load_dual_ar(path, "cuda", dtype)
        expected = all_tensors(host)
        for name, tensor in all_tensors(model).items():
            assert torch.equal(tensor, expected[name]), name


def all_tensors(model: DualAR) -> dict[str, torch.Tensor]:
    """On the host, unpacked, the RoPE tables too."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (tensor.to_dense() if tensor.is_mkldnn else tensor).cpu()
        for name, tensor in tensors.items()
    }
