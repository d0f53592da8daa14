"""The walls of the house, read from the source: who may import whom, and where vendors may be named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "speechtrain"
SOURCES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "launchers").rglob("*.py")])

EVERYONE = {"errors", "batch", "randomness", "forms", "__init__"}

# an axis: what it may import of speechtrain besides itself and EVERYONE (design.md, "Who may import whom")
MAY_IMPORT = {
    # they compose the parts and show them; torch.nn blocks and trackers are none of their business
    "commands": {"config", "launch", "run", "worker", "evaluation", "distributed", "checkpoint", "task"}
    | {"precision", "devices.base", "devices", "guard", "data", "text", "report", "metrics", "interop"},
    "config": {"limits"},
    "worker": {"config", "trainer", "distributed", "checkpoint", "run", "task", "limits", "precision"}
    | {"devices.base", "data.base", "optim.ema", "processes", "text.vocabulary", "interop.weights"}
    | {"tracking.base", "tracking.group", "interop.weights", "sharding", "watchdog"},
    "trainer": {"checkpoint", "data.base", "devices.base", "distributed", "evaluation", "limits", "metrics"}
    | {"optim.ema", "optim.schedules", "precision", "profiling", "task", "tracking.base", "update"}
    | {"warmup"},
    "warmup": {"optim.ema"},
    "update": {"optim.common", "optim.ema", "precision", "shards"},
    "evaluation": {"devices.base", "distributed", "metrics", "precision", "task"},
    "models": {"task", "nn", "decoding", "text", "metrics"},
    "devices": set(),
    "data": {"text"},
    "decoding": set(),
    "nn": set(),
    "optim": {"shards"},
    "precision": {"shards"},
    "checkpoint": {"shards"},
    "sharding": {"checkpoint", "distributed", "shards"},
    "shards": set(),
    "profiling": set(),
    "tracking": set(),
    "text": set(),
    "metrics": set(),
    "task": set(),
    "distributed": {"watchdog"},
    "watchdog": set(),
    "launch": {"processes"},
    "limits": set(),
    "processes": set(),
    "run": set(),
    "report": {"metrics", "run", "tracking"},
    "interop": {"models", "nn", "checkpoint"},
    "launchers": {"launch", "distributed", "node", "processes"},
    "node": {"launch", "processes", "run"},
    "batch": set(),
    "randomness": set(),
    "errors": set(),
    "forms": set(),
    "guard": set(),
    "__init__": set(),
}


def axis_of(path: Path) -> str:
    if PACKAGE in path.parents:
        return path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "launchers"


def imports(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            # `from speechtrain.data import base` names a module, so the imported name counts too
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_design(path: Path) -> None:
    axis = axis_of(path)
    assert axis in MAY_IMPORT, f"{axis} is a new axis: say in MAY_IMPORT and the design what it may import"
    allowed = MAY_IMPORT[axis] | EVERYONE | {axis}
    for line, name in imports(path):
        if not name.startswith("speechtrain."):
            continue
        target = name.removeprefix("speechtrain.")
        assert any(target == a or target.startswith(a + ".") for a in allowed) or target.startswith(
            "__version__"
        ), f"{path.relative_to(ROOT)}:{line} imports {name}; {axis} may import {sorted(allowed)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_hydra_stays_at_the_door(path: Path) -> None:
    if axis_of(path) in ("commands", "config", "worker"):
        return
    named = [name for _, name in imports(path) if name.split(".")[0] in ("hydra", "omegaconf")]
    assert not named, f"{path.relative_to(ROOT)} imports {named}; classes never meet the config"


VENDORS = {
    r"habana_frameworks": "hpu.py",
    r"intel_extension_for_pytorch": "ipex.py",
    r"torch\.cuda": "cuda.py",
    r"torch\._lazy": "lazy.py",
}


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_vendor_is_named_in_one_file(vendor: str) -> None:
    named = {p.name for p in SOURCES if re.search(vendor, p.read_text())}
    assert named <= {VENDORS[vendor]}


def test_nobody_asks_which_device_it_is() -> None:
    asks = re.compile(r"\b(if|elif)\b.*\b(device|backend)(\.name|\.type)?\s*(==|!=|in)\s")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if asks.search(line)
    ]
    assert not found


def test_launchers_are_named_by_target_only() -> None:
    named = [str(p) for p in SOURCES for _, name in imports(p) if name.startswith("speechtrain.launchers")]
    assert not named


def test_conf_lives_at_the_top_only() -> None:
    assert not (PACKAGE / "conf").exists(), "speechtrain/conf would shadow the mapped package"
    assert (ROOT / "conf" / "__init__.py").exists()


def test_no_folder_pickles_are_loaded() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "torch.load",
                "pickle.load",
                "pickle.loads",
            ):
                keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert keywords.get("weights_only") == "True", f"{path}:{node.lineno}"
