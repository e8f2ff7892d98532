"""Linears in 8 bits give a stage back when what they read of it has arrived: the code tells.

An arrival at a barrier does not wait for loads from shared memory that are on their way. A load that
comes later than the arrival reads what the copy engine writes next: rows got the scales of the next
block, on a busy device only, so that tests of results notice by chance. What orders the two is that
the arrival's address is computed from what was loaded (`after_loads` of linear_common.cuh), which
the hardware waits for. In PTX, where a register stands for one value, that can be followed.
"""

import re
from dataclasses import replace

import pytest

from ops import nvrtc
from ops.linear_plans import WidePlan, plan_for

compiler = pytest.importorskip("cuda.bindings.nvrtc")

# Bits of an arrival's address that stand for what was loaded.
DEPENDENCE = " + (loaded & (gridDim.z - 1))"
S2_PRO = [(6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)]
OTHERS = [(320, 832), (1664, 320)]  # whose plans nobody measured
GATE_UP = {19456, 1664}
ROWS = (8, 16, 32, 64, 128)

INSTRUCTION = re.compile(r"(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(\{[^}]*\}|[^,{]+),(.*)", re.DOTALL)
REGISTER = re.compile(r"%[a-z]+\d+")


def ptx(source, defines):
    """What NVRTC makes of a source before registers are allocated."""
    options = [f"-I{nvrtc.SOURCES}", *(f"-I{path}" for path in nvrtc._cuda_includes())]
    options += nvrtc._options("compute_90a", defines)
    text = (nvrtc.SOURCES / source).read_bytes()
    _, program = compiler.nvrtcCreateProgram(text, source.encode(), 0, [], [])
    (status,) = compiler.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    assert status == 0, nvrtc._compile_log(compiler, program)
    made = b" " * compiler.nvrtcGetPTXSize(program)[1]
    compiler.nvrtcGetPTX(program, made)
    compiler.nvrtcDestroyProgram(program)
    return made.decode()


def loads_awaited(text):
    """For each arrival, how many loads from shared memory its address is computed from."""
    reads, loads, arrivals = {}, {}, []
    for number, statement in enumerate(re.split(r"[;\n]", text)):
        match = INSTRUCTION.search(statement)
        if match is None:
            continue
        operation, target, rest = match.groups()
        if operation.startswith("mbarrier.arrive.shared"):
            arrivals.append(REGISTER.findall(rest))
            continue
        for register in REGISTER.findall(target) * ("[" not in target):
            reads.setdefault(register, set()).update(REGISTER.findall(rest))
            if operation.startswith("ld.shared"):
                loads[register] = number
    return [len(loads_behind(registers, reads, loads)) for registers in arrivals]


def loads_behind(registers, reads, loads):
    """Numbers of the loads that registers are computed from."""
    found, seen, left = set(), set(), list(registers)
    while left:
        register = left.pop()
        if register in loads:
            found.add(loads[register])
        elif register not in seen:
            seen.add(register)
            left += reads.get(register, ())
    return found


def variants(kernel):
    """Defines of all plans whose scales of x pass through the ring."""
    seen = {}
    for n, k in S2_PRO + OTHERS:
        for rows in ROWS:
            is_gate_up = n in GATE_UP
            plan = plan_for("bsfp8", rows, n, k, is_gate_up=is_gate_up)
            plans = [plan] * (plan.kernel == kernel)
            if plans and isinstance(plan, WidePlan):
                plans.append(replace(plan, scales_rows=True))
                plans += [replace(plan, norms=True)] * plan.can_norm(True, n)
            for each in plans:
                defines = each.defines(True, is_gate_up, k)
                seen[*sorted(defines.items()),] = defines
    return list(seen.values())


def scales_read(kernel, defines):
    """Loads a thread makes of a block's scales of x."""
    return 2 if kernel == "linear_wide" else defines["COLS"] // 8


@pytest.mark.parametrize("kernel", ["linear", "linear_wide"])
def test_a_stage_is_given_back_when_its_scales_are_there(kernel):
    chosen = variants(kernel)
    assert len(chosen) >= 10
    for defines in chosen:
        awaited = loads_awaited(ptx(f"{kernel}.cu", defines))
        assert awaited and set(awaited) == {scales_read(kernel, defines)}, (defines, awaited)


@pytest.mark.parametrize("kernel", ["linear", "linear_wide"])
def test_it_would_be_seen(kernel, tmp_path, monkeypatch):
    """The race put back: nothing ties the arrival to the loads."""
    texts = {path.name: path.read_text() for path in nvrtc.SOURCES.iterdir()}
    assert sum(DEPENDENCE in text for text in texts.values()) == 1
    for name, text in texts.items():
        (tmp_path / name).write_text(text.replace(DEPENDENCE, ""))
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path)
    for defines in variants(kernel)[::4]:
        awaited = loads_awaited(ptx(f"{kernel}.cu", defines))
        assert awaited and not any(awaited), (defines, awaited)
