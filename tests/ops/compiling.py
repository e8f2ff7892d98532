"""Kernels are compiled for devices that are not here."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from ops import nvrtc

ARCHS = ("sm_90a", "sm_120a")


def check_compiles(
    programs: Iterable[tuple[str, Mapping[str, int | str]]], archs: Iterable[str] = ARCHS
) -> None:
    """Sources with their defines, for every architecture, two at a time."""
    pytest.importorskip("cuda.bindings.nvrtc")
    wanted = [(source, arch, defines) for source, defines in programs for arch in archs]
    with ThreadPoolExecutor(2) as pool:
        cubins = pool.map(lambda program: nvrtc.compile_source(*program), wanted)
        for program, cubin in zip(wanted, cubins, strict=True):
            assert cubin[:4] == b"\x7fELF", program
