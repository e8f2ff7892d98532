"""Facts about the machine, the software and a process, for the record of a run."""

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from bench_ttfa.provenance import commit_here, source_digest

_SERVER = ("torch", "websockets", "av", "numpy", "pydantic", "fastapi", "uvicorn", "opuslib")
_KERNELS = ("triton", "cuda-bindings", "nvidia-cuda-nvrtc", "sgl-deep-gemm", "flashinfer-python")
_HZ = os.sysconf("SC_CLK_TCK")


def describe_machine() -> dict[str, object]:
    return {
        "cpu": _cpu_model(),
        "cpu_cores": num_cores(),
        "memory_gib": round(_kib(Path("/proc/meminfo"), "MemTotal") / 2**20, 1),
        "gpus": _lines("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "os": platform.platform(),
    }


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def describe_software() -> dict[str, object]:
    versions = {name: _version(name) for name in (*_SERVER, *_KERNELS)}
    return {
        "python": platform.python_version(),
        "packages": {name: version for name, version in versions.items() if version},
        "commit": commit_here(),
        "sources": source_digest(),
    }


def resident_mib(pid: int) -> float | None:
    """Resident memory of a process and its children now; None if it is not there to ask."""
    return _status_mib(pid, "VmRSS")


def peak_resident_mib(pid: int) -> float | None:
    """The most each of them has had since it started, together."""
    return _status_mib(pid, "VmHWM")


def thread_times(pid: int) -> dict[str, tuple[float, float]]:
    """CPU seconds (user, system) so far of a process's threads and of its children's, by name.

    Threads of one name are one entry; the main thread of `pid` itself is "event loop".
    """
    times: dict[str, tuple[float, float]] = {}
    for task in _tasks(pid):
        try:
            # comm is in brackets and may hold blanks; utime and stime are fields 14 and 15 of all
            comm, _, rest = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
        except OSError:  # it has just ended
            continue
        name = "event loop" if task.name == str(pid) else comm
        user, system = times.get(name, (0.0, 0.0))
        fields = rest.split()
        times[name] = (user + int(fields[11]) / _HZ, system + int(fields[12]) / _HZ)
    return times


def _tasks(pid: int) -> list[Path]:
    found: list[Path] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found.append(task)
            for child in (task / "children").read_text().split():
                found += _tasks(int(child))
    except OSError:
        pass
    return found


def _status_mib(pid: int, name: str) -> float | None:
    pids = {task.parts[2] for task in _tasks(pid)} or {str(pid)}
    try:
        return round(sum(_kib(Path(f"/proc/{each}/status"), name) for each in pids) / 1024, 1)
    except OSError:
        return None


def _kib(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    return 0


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _lines(*command: str) -> list[str]:
    if shutil.which(command[0]) is None:
        return []
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.splitlines() if result.returncode == 0 else []
