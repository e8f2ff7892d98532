"""CUDA C++ of `ops/csrc`, compiled at run time by NVRTC, kept on disk, launched on torch's stream.

Users need a driver and the wheels of the extra `cuda`, no compiler. Compiling needs no GPU, so
every source is compiled for every architecture in the tests. Programs are compiled without fast
math: what may be approximate is spelled so in the source (`__expf`).

The first launch of a kernel compiles and loads it: it must not happen under graph capture. Later
ones may be captured; they allocate nothing on the device and wait for nothing. Many kernels are
compiled at once, on all cores, by a first round of calls `compiling` that launches nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCES = Path(__file__).parent / "csrc"

Scalar = ctypes.c_int32 | ctypes.c_int64 | ctypes.c_float | ctypes.c_uint32 | ctypes.c_uint64
Argument = Tensor | Scalar | ctypes.Structure | ctypes.Array[ctypes.c_uint64] | None
Dim = tuple[int, ...]
_LaunchKey = tuple[Dim, Dim, int, Dim, bool, int]
_Program = tuple[str, str, tuple[tuple[str, int | str], ...]]  # source, architecture, defines

_MAX_THREADS = 16  # that compile at once
_MAX_CONFIGS = 4096  # launch shapes remembered per kernel; a server has tens
_DIGEST_BYTES = hashlib.sha256().digest_size
_FLAGS = ("-std=c++17", "-lineinfo", "-default-device")


class KernelError(RuntimeError):
    """Compiling, loading or launching a kernel failed."""


class Kernel:
    """One `extern "C"` function of a source file; compiled and loaded at its first launch."""

    def __init__(self, source: str, name: str, defines: Mapping[str, int | str]) -> None:
        self._source = source
        self._name = name
        self._defines = dict(defines)
        self._lock = threading.Lock()
        self._handles: dict[int, Any] = {}
        self._max_shared: dict[int, int] = {}
        self._configs: dict[_LaunchKey, tuple[Any, Any]] = {}

    def launch(
        self,
        grid: Dim,
        block: Dim,
        args: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        cluster: Dim = (1, 1, 1),
        is_dependent: bool = True,
    ) -> None:
        """Enqueue the kernel on torch's current stream.

        Args:
            grid, block, cluster: up to three numbers, x first.
            args: tensors on the current device go as pointers (None as a null pointer), scalars as
                ctypes values of exactly the type the kernel declares; a tensor map is 16 u64.
            is_dependent: programmatic dependent launch: the kernel may start while the one before
                it in the stream drains, and must run `griddepcontrol.wait` before it touches
                anything another kernel reads or writes.

        Raises:
            KernelError: the driver refused it.
        """
        ahead = getattr(_thread, "ahead", None)
        if ahead is not None:
            ahead.want(self, torch.cuda.current_device())
            return
        device = torch._C._cuda_getDevice()
        handle = self._handles.get(device) or self._load(device)
        if shared_bytes > self._max_shared.get(device, 0):  # the default counts static memory too
            self._allow_shared(device, shared_bytes)
        values = [
            ctypes.c_void_p(0 if arg is None else arg.data_ptr())
            if arg is None or isinstance(arg, Tensor)
            else arg
            for arg in args
        ]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        stream = torch._C._cuda_getCurrentRawStream(device)
        key = (grid, block, shared_bytes, cluster, is_dependent, stream)
        config = self._configs.get(key) or self._remember(key)
        _bind_thread()
        status = _driver().cuLaunchKernelEx(config[0], handle, ctypes.addressof(pointers), 0)[0]
        if status != 0:
            raise KernelError(f"{self._source}:{self._name} {key}: {_driver_error(status)}")

    def _program(self, device: int) -> _Program:
        return self._source, _arch(device), tuple(sorted(self._defines.items()))

    def _load(self, device: int) -> Any:
        with self._lock:
            if device not in self._handles:
                library = _library(*self._program(device))
                driver = _driver()
                function = _check(driver.cuLibraryGetKernel(library, self._name.encode()))
                _bind_thread()
                # Puts it onto the device: now, not when it is captured.
                _check(driver.cuKernelGetFunction(function))
                self._handles[device] = driver.CUfunction(int(function))
        return self._handles[device]

    def _allow_shared(self, device: int, shared_bytes: int) -> None:
        driver = _driver()
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        kernel = driver.CUkernel(int(self._handles[device]))
        with self._lock:  # another thread may have allowed more meanwhile
            most = max(shared_bytes, self._max_shared.get(device, 0))
            _check(driver.cuKernelSetAttribute(attribute, most, kernel, driver.CUdevice(device)))
            self._max_shared[device] = most

    def _remember(self, key: _LaunchKey) -> tuple[Any, Any]:
        if len(self._configs) >= _MAX_CONFIGS:
            self._configs.clear()
        return self._configs.setdefault(key, _launch_config(key))


@functools.cache
def _kernel(source: str, name: str, defines: tuple[tuple[str, int | str], ...]) -> Kernel:
    return Kernel(source, name, dict(defines))


def kernel(source: str, name: str, *, defines: Mapping[str, int | str] | None = None) -> Kernel:
    """The `extern "C"` function `name` of `ops/csrc/<source>`; the same object for the same call."""
    return _kernel(source, name, tuple(sorted((defines or {}).items())))


class _Ahead:
    """Kernels whose programs are compiled side by side, each once. NVRTC lets other threads run
    meanwhile."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_num_threads(), thread_name_prefix="plosive-compile")
        self._jobs: dict[_Program, Future[Any]] = {}
        self._kernels: dict[tuple[Kernel, int], None] = {}  # with their devices

    def want(self, kernel: Kernel, device: int) -> None:
        if (kernel, device) in self._kernels:
            return
        self._kernels[kernel, device] = None
        program = kernel._program(device)
        if program not in self._jobs:
            self._jobs[program] = self._pool.submit(_library, *program)

    def finish(self) -> None:
        self._pool.shutdown()
        for job in self._jobs.values():
            job.result()
        for kernel, device in self._kernels:
            kernel._load(device)


def _num_threads() -> int:
    """Each takes 50 MB while it compiles."""
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return min(num_cores, _MAX_THREADS)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Inside, this thread's launches launch nothing: what they need is compiled, many at once, and
    loaded afterwards, so that it may be captured. What kernels would have written is left as it was.

    Raises:
        KernelError: afterwards, of the first that could not be compiled.
    """
    _thread.ahead = ahead = _Ahead()
    try:
        yield
    finally:
        _thread.ahead = None
        ahead.finish()


def is_compiling() -> bool:
    """Whether this thread is inside `compiling`."""
    return getattr(_thread, "ahead", None) is not None


def compile_source(source: str, arch: str, defines: Mapping[str, int | str] | None = None) -> bytes:
    """Machine code (cubin) of `ops/csrc/<source>` for `arch`, for example sm_90a.

    Taken from the cache if sources, flags, architecture and compiler version are the same. The
    cache is `$PLOSIVE_KERNEL_CACHE`, else `$XDG_CACHE_HOME/plosive/kernels`; one that cannot be
    written is done without.

    Raises:
        KernelError: with the compiler's log.
    """
    options = _options(arch, defines or {})
    path = _cache_dir() / f"{Path(source).stem}-{arch}-{_digest(source, options)}.cubin"
    cubin = _read_cached(path)
    if cubin is None:
        cubin = _compile((SOURCES / source).read_text(), source, options)
        _write_cached(path, cubin)
    return cubin


def _options(arch: str, defines: Mapping[str, int | str]) -> list[str]:
    macros = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    return [f"-arch={arch}", *_FLAGS, *macros]


def _digest(source: str, options: Sequence[str]) -> str:
    digest = hashlib.sha256(repr((list(options), _compiler_version())).encode())
    for path in (SOURCES / source, *sorted(SOURCES.glob("*.cuh"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _cache_dir() -> Path:
    explicit = os.environ.get("PLOSIVE_KERNEL_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "plosive" / "kernels"


def _read_cached(path: Path) -> bytes | None:
    """None: it is not there, or not whole, as after a power loss."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    cubin, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _write_cached(path: Path, cubin: bytes) -> None:
    """Whole or not at all, with its digest behind it; readable for whom the umask lets."""
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(cubin + hashlib.sha256(cubin).digest())
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()


def _compile(text: str, source: str, options: Sequence[str]) -> bytes:
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    includes = [f"-I{SOURCES}", *(f"-I{path}" for path in _cuda_includes())]
    flags = [option.encode() for option in (*options, *includes)]
    status, program = nvrtc.nvrtcCreateProgram(text.encode(), source.encode(), 0, [], [])
    if status != 0:
        raise KernelError(f"{source}: {status}")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        if status != 0:
            raise KernelError(f"{source} {list(options)}: {status}\n{_compile_log(nvrtc, program)}")
        cubin: bytes = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _compile_log(nvrtc: Any, program: Any) -> str:
    log: bytes = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.rstrip(b"\0 \n").decode(errors="replace")


@functools.cache
def _compiler_version() -> tuple[int, int]:
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    _, major, minor = nvrtc.nvrtcVersion()
    return major, minor


@functools.cache
def _cuda_includes() -> tuple[Path, ...]:
    """Folders of CUDA's headers: those of the runtime's wheel, else of an installed toolkit."""
    nvidia = PathFinder.find_spec("nvidia")
    roots = [Path(root) for root in (nvidia.submodule_search_locations or ())] if nvidia else []
    candidates = [path for root in roots for path in sorted(root.glob("*/include"), reverse=True)]
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    candidates.append(Path(toolkit) / "include")
    found = tuple(path for path in candidates if (path / "cuda_fp8.h").is_file())
    if not found:
        raise KernelError("CUDA's headers are missing: pip install nvidia-cuda-runtime")
    return found[:1]


@functools.cache
def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _check(result: tuple[Any, ...]) -> Any:
    if result[0] != 0:
        raise KernelError(_driver_error(result[0]))
    return result[1] if len(result) > 1 else None


def _driver_error(status: Any) -> str:
    text = _driver().cuGetErrorString(status)[1]
    return f"{status!r}: {text.decode() if text else 'no description'}"


@functools.cache
def _library(source: str, arch: str, defines: tuple[tuple[str, int | str], ...]) -> Any:
    cubin = compile_source(source, arch, dict(defines))
    status, library = _driver().cuLibraryLoadData(cubin, [], [], 0, [], [], 0)
    if status != 0:
        raise KernelError(f"{source}: {_driver_error(status)}{_old_driver()}")
    return library


def _old_driver() -> str:
    """Why the driver may refuse what NVRTC has made, and what to do; nothing if it is new enough."""
    version, needed = _driver().cuDriverGetVersion()[1], _compiler_version()[0]
    if version // 1000 >= needed:
        return ""
    return (
        f"; the driver is of CUDA {version // 1000}.{version % 1000 // 10}, and kernels compiled by "
        f"NVRTC {needed} need one of CUDA {needed}"
    )


@functools.cache
def _arch(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"


_thread = threading.local()


def _bind_thread() -> None:
    """The driver needs a current context, which torch makes only when it launches by itself."""
    if not hasattr(_thread, "is_bound"):
        torch.cuda.set_device(torch.cuda.current_device())
        _thread.is_bound = True


def _launch_config(key: _LaunchKey) -> tuple[Any, Any]:
    """The launch descriptor, and what must live as long as it."""
    grid, block, shared_bytes, cluster, is_dependent, stream = key
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = _three(grid)
    config.blockDimX, config.blockDimY, config.blockDimZ = _three(block)
    config.sharedMemBytes = shared_bytes
    config.hStream = driver.CUstream(stream)
    attributes = []
    if _three(cluster) != (1, 1, 1):
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dims = attribute.value.clusterDim
        dims.x, dims.y, dims.z = _three(cluster)
        attributes.append(attribute)
    if is_dependent:
        attribute = driver.CUlaunchAttribute()
        attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config, attributes


def _three(dims: Dim) -> tuple[int, int, int]:
    x, y, z = (*dims, 1, 1, 1)[:3]
    return x, y, z
