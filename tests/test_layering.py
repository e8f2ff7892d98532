"""Dependencies point one way: ops <- model <- realtime.pingpong; clients know only the wire."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("ops", "model", "realtime", "clients", "bench_ttfa")

# What measures a device from inside; nothing imports it but another of these.
ON_DEVICE = tuple(
    f"bench_ttfa.{name}"
    for name in (
        "codec",
        "counters",
        "engine",
        "frames",
        "gate_inputs",
        "gate_models",
        "gate_quantised",
        "gpu_timing",
        "kernels",
        "kernels_attention",
        "kernels_layer",
        "peers",
        "widened",
    )
)

# Who may import what of ours, by longest matching prefix; a package may always import itself.
ALLOWED: dict[str, tuple[str, ...]] = {
    "ops": (),
    "model": ("ops",),
    "model.embedded.recipe": ("ops", "model", "clients"),
    "clients": ("realtime.wire", "realtime.errors"),
    "bench_ttfa": ("clients", "realtime.wire", "realtime.errors"),
    **dict.fromkeys(ON_DEVICE, ("ops", "model", "realtime.pingpong", "bench_ttfa")),
    "realtime.errors": (),
    "realtime.wire": ("realtime.errors",),
    "realtime.threads": (),
    "realtime.garbage": (),
    "realtime.child_signals": (),
    "realtime.pingpong": (
        "ops",
        "model",
        "realtime.errors",
        "realtime.threads",
        "realtime.pingpong",
    ),
    "realtime.pingpong.messages": (),
    "realtime.pingpong.api": ("realtime.pingpong.messages",),
    "realtime.remote": (
        "realtime.errors",
        "realtime.child_signals",
        "realtime.garbage",
        "realtime.threads",
        "realtime.pingpong.messages",
        "realtime.pingpong.api",
        "realtime.pingpong.slots",
        "realtime.remote",
    ),
    "realtime.session": (
        "realtime.wire",
        "realtime.errors",
        "realtime.pingpong.messages",
        "realtime.pingpong.api",
        "realtime.session",
    ),
    "realtime.adapters": (
        "realtime.wire",
        "realtime.errors",
        "realtime.session",
        "realtime.pingpong.messages",
        "realtime.pingpong.api",
    ),
    "realtime.cli": ("realtime", "clients", "model"),
    "realtime.__main__": ("realtime.cli",),
    "realtime": (
        "realtime.threads",
        "realtime.garbage",
        "realtime.child_signals",
        "realtime.remote.link",
        "realtime.pingpong.slots",
        "realtime.wire",
        "realtime.errors",
        "realtime.session",
        "realtime.pingpong.messages",
        "realtime.pingpong.api",
        "realtime.adapters",
    ),
}
TORCH_FREE = ("clients", "bench_ttfa", "realtime.session", "realtime.wire", "realtime.errors")
PURE = ("realtime.session", "realtime.wire", "realtime.errors", "realtime.pingpong.messages")


def modules() -> list[tuple[str, Path]]:
    found = []
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((".".join(parts).removesuffix(".__init__"), path))
    return found


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            names.update({module, *(f"{module}.{alias.name}" for alias in node.names)})
    return names


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def rule(module: str) -> str:
    return max((key for key in ALLOWED if within(module, key)), key=len)


def siblings(module: str, name: str) -> bool:
    """Files directly in `realtime/` may import one another, and the adapters may import them."""
    is_file = rule(module) == "realtime.adapters" or (
        rule(module) == "realtime" and module.count(".") == 1
    )
    return is_file and name.count(".") <= 2 and rule(name) == "realtime"


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: str(value))
def test_imports_point_one_way(module: str, path: Path) -> None:
    allowed = ALLOWED[rule(module)]
    for name in imports(path):
        if not within(name, "realtime") and not any(within(name, package) for package in OURS):
            continue
        is_own = within(name, rule(module)) and rule(module) != "realtime"
        is_allowed = any(within(name, prefix) or within(prefix, name) for prefix in allowed)
        assert is_own or is_allowed or siblings(module, name), f"{module} may not import {name}"


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: str(value))
def test_forbidden_libraries(module: str, path: Path) -> None:
    names = imports(path)
    if any(within(module, prefix) for prefix in TORCH_FREE) and module not in ON_DEVICE:
        assert not any(within(name, "torch") for name in names), f"{module} imports torch"
    if any(within(module, prefix) for prefix in PURE):
        for library in ("asyncio", "threading", "socket", "time"):
            assert not any(within(name, library) for name in names), f"{module} imports {library}"
    if module.startswith("realtime.pingpong"):
        for library in ("asyncio", "fastapi", "websockets", "uvicorn", "socket"):
            assert not any(within(name, library) for name in names), f"{module} imports {library}"


def test_event_loop_side_runs_without_torch() -> None:
    """The server's own files and the clients import, in one process, with torch made unimportable."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import realtime.server, realtime.egress, realtime.session.core, clients, bench_ttfa\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_the_rules_catch_a_violation() -> None:
    assert rule("realtime.pingpong.decode") == "realtime.pingpong"
    assert not any(within("realtime.server", prefix) for prefix in ALLOWED["clients"])
    assert not any(within("model.codec", prefix) for prefix in ALLOWED["ops"])
