"""The compiler around the kernels: every source for every architecture, the cache, errors."""

import ctypes
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ops import nvrtc

pytest.importorskip("cuda.bindings.nvrtc")

ARCHS = ["sm_90a", "sm_100a", "sm_120a"]
ADD = """
#include "common.cuh"
extern "C" __global__ void add(const float* a, float* out, float term, int n) {
  wait_for_previous_kernels();
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = a[i] + term * SCALE;
  let_next_kernel_start();
}
"""


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder of sources with one kernel in it, and a cache of its own."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "common.cuh").write_text((nvrtc.SOURCES / "common.cuh").read_text())
    (folder / "add.cu").write_text(ADD)
    monkeypatch.setattr(nvrtc, "SOURCES", folder)
    monkeypatch.setenv("PLOSIVE_KERNEL_CACHE", str(tmp_path / "cache"))
    return folder


def cached(sources):
    return sorted(path.name for path in (sources.parent / "cache").glob("*.cubin"))


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_without_a_gpu(sources, arch):
    cubin = nvrtc.compile_source("add.cu", arch, {"SCALE": 2})
    assert cubin[:4] == b"\x7fELF" and b"add" in cubin
    assert len(cached(sources)) == 1 and cached(sources)[0].startswith(f"add-{arch}-")


def test_a_changed_header_define_or_source_is_compiled_again(sources):
    for change in range(4):
        if change >= 2:
            path = sources / ("common.cuh" if change == 2 else "add.cu")
            path.write_text(path.read_text() + "\n")
        nvrtc.compile_source("add.cu", "sm_90a", {"SCALE": min(change, 1)})
        assert len(cached(sources)) == change + 1


def test_what_is_cached_is_not_compiled_again(sources, monkeypatch):
    first = nvrtc.compile_source("add.cu", "sm_90a", {"SCALE": 2})
    monkeypatch.setattr(nvrtc, "_compile", None)
    assert nvrtc.compile_source("add.cu", "sm_90a", {"SCALE": 2}) == first


@pytest.mark.parametrize("num_bytes", [0, 20, 1000])
def test_what_is_not_whole_in_the_cache_is_compiled_again(sources, num_bytes):
    first = nvrtc.compile_source("add.cu", "sm_90a", {"SCALE": 2})
    path = sources.parent / "cache" / cached(sources)[0]
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert nvrtc.compile_source("add.cu", "sm_90a", {"SCALE": 2}) == first
    assert path.read_bytes().startswith(first)


def test_the_cache_is_as_readable_as_other_files(sources):
    nvrtc.compile_source("add.cu", "sm_90a", {"SCALE": 2})
    path = sources.parent / "cache" / cached(sources)[0]
    assert path.stat().st_mode == (sources / "add.cu").stat().st_mode


def test_a_write_that_fails_leaves_nothing(sources, monkeypatch):
    def write(path, data):
        path.write_text(str(data[:10]))
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)
    assert nvrtc.compile_source("add.cu", "sm_90a", {"SCALE": 2})[:4] == b"\x7fELF"
    assert not list((sources.parent / "cache").iterdir())


def test_a_cache_that_cannot_be_written_is_done_without(sources, monkeypatch):
    (sources.parent / "file").write_text("")
    monkeypatch.setenv("PLOSIVE_KERNEL_CACHE", str(sources.parent / "file" / "cache"))
    assert nvrtc.compile_source("add.cu", "sm_90a", {"SCALE": 2})[:4] == b"\x7fELF"


def test_an_error_carries_the_compilers_words(sources):
    with pytest.raises(nvrtc.KernelError, match='add.cu.*\n.*identifier "SCALE" is undefined'):
        nvrtc.compile_source("add.cu", "sm_90a")


@pytest.mark.parametrize(
    ("version", "told"), [(12_080, "the driver is of CUDA 12.8"), (13_000, "")]
)
def test_a_driver_that_is_too_old_is_named(sources, monkeypatch, version, told):
    driver = SimpleNamespace(
        cuLibraryLoadData=lambda *_: (200, None),
        cuGetErrorString=lambda status: (0, b"device kernel image is invalid"),
        cuDriverGetVersion=lambda: (0, version),
    )
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    monkeypatch.setattr(nvrtc, "_compiler_version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: b"cubin")
    with pytest.raises(nvrtc.KernelError, match="image is invalid") as raised:
        nvrtc._library.__wrapped__("add.cu", "sm_90a", ())
    assert told in str(raised.value) and ("need one of CUDA 13" in str(raised.value)) == bool(told)


def test_the_same_kernel_is_one_object(sources):
    assert nvrtc.kernel("add.cu", "add", defines={"SCALE": 1}) is nvrtc.kernel(
        "add.cu", "add", defines={"SCALE": 1}
    )
    assert nvrtc.kernel("add.cu", "add", defines={"SCALE": 1}) is not nvrtc.kernel(
        "add.cu", "add", defines={"SCALE": 2}
    )


@pytest.fixture
def loaded(monkeypatch):
    """Programs that are loaded, and kernels, on a device that is made up."""
    programs = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(nvrtc, "_arch", lambda device: "sm_90a")
    monkeypatch.setattr(nvrtc, "_library", lambda *program: programs.append(program))
    monkeypatch.setattr(nvrtc.Kernel, "_load", lambda kernel, device: programs.append(kernel))
    return programs


def test_launches_ahead_are_compiled_side_by_side_and_once(loaded, monkeypatch):
    both = threading.Barrier(2, timeout=10)  # of one after the other the first would wait for ever

    def load(*program):
        both.wait()
        loaded.append(program)

    monkeypatch.setattr(nvrtc, "_library", load)
    monkeypatch.setattr(nvrtc, "_num_threads", lambda: 2)
    kernels = [nvrtc.kernel("add.cu", "add", defines={"SCALE": scale}) for scale in (2, 3)]
    with nvrtc.compiling():
        for kernel in (*kernels, *kernels):
            kernel.launch((1,), (64,), [])
    assert sorted(loaded[:2]) == [("add.cu", "sm_90a", (("SCALE", scale),)) for scale in (2, 3)]
    assert loaded[2:] == kernels, "loaded when they are compiled"


def test_what_cannot_be_compiled_ahead_is_told_and_launches_are_launches_again(loaded, monkeypatch):
    def fail(*program):
        raise nvrtc.KernelError(str(program))

    monkeypatch.setattr(nvrtc, "_library", fail)
    monkeypatch.setattr(nvrtc.Kernel, "_load", fail)
    kernel = nvrtc.kernel("add.cu", "add", defines={"SCALE": 7})
    with pytest.raises(nvrtc.KernelError, match="add.cu"), nvrtc.compiling():
        kernel.launch((1,), (64,), [])
    launched = []
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: launched.append(1) or 0, raising=False)
    with pytest.raises(nvrtc.KernelError):
        kernel.launch((1,), (64,), [])
    assert launched


@pytest.mark.gpu
def test_what_was_compiled_ahead_has_not_run_and_runs(sources, monkeypatch):
    device = torch.device("cuda")
    a, out = torch.ones(64, device=device), torch.zeros(64, device=device)
    args = [a, out, ctypes.c_float(3.0), ctypes.c_int32(64)]
    kernel = nvrtc.kernel("add.cu", "add", defines={"SCALE": 11})
    with nvrtc.compiling():
        kernel.launch((1,), (64,), args)
    assert not out.any()
    monkeypatch.setattr(nvrtc.Kernel, "_load", None)  # it is there
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch((1,), (64,), args)
    assert not out.any()
    graph.replay()
    assert torch.equal(out, a + 33)


@pytest.mark.gpu
def test_launch_follows_the_stream_and_capture(sources):
    add = nvrtc.kernel("add.cu", "add", defines={"SCALE": 3})
    x = torch.randn(1000, device="cuda")
    out = torch.full_like(x, torch.nan)
    args = [x, out, ctypes.c_float(2.0), ctypes.c_int32(x.numel())]
    add.launch((8,), (128,), args)
    assert torch.equal(out, x + 6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.mul_(2)
        add.launch((4,), (256,), args)
        out.add_(1)
    x.fill_(1)
    graph.replay()
    assert torch.equal(out, torch.full_like(x, 9.0))


@pytest.mark.gpu
def test_launch_refuses_what_the_driver_refuses(sources):
    add = nvrtc.kernel("add.cu", "add", defines={"SCALE": 3})
    x = torch.zeros(8, device="cuda")
    with pytest.raises(nvrtc.KernelError, match="CUDA_ERROR_INVALID_VALUE"):
        add.launch((1,), (4096,), [x, x, ctypes.c_float(1), ctypes.c_int32(8)])
