"""One module uses the private parts of a library. No other module replaces a part of a library.

ruff's rule SLF001 finds private attributes of other objects. Here are the other ways to a private part.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "speechtrain").rglob("*.py"), *(ROOT / "launchers").rglob("*.py")])

MODULES = {
    "speechtrain/torch_private.py": "torch",
    "speechtrain/interop/pickles.py": "the names of Python 2 in _compat_pickle",
}
"""Modules that use private parts of a library: which library."""
SETTINGS = {
    "sys",
    "sys.argv",
    "os.environ",
    "logging.raiseExceptions",
    "logging.getLogger('speechtrain').propagate",
    "torch.backends.cudnn.allow_tf32",
}
"""Attributes of libraries that are there to be set."""
INHERITED = {*dir(nn.Module()), *dir(torch.optim.SGD([torch.zeros(1)])), *dir(torch.autograd.Function)}
"""Names of the classes of torch that classes of the package are derived from."""


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.endswith("__")


def paths_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the paths that a line imports from libraries."""
    module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return [module + alias.name for alias in node.names if not module.startswith("speechtrain.")]


def libraries_of(tree: ast.AST) -> set[str]:
    """Return the names by which a module knows libraries and their parts."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and paths_of(node):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def uses(tree: ast.AST) -> list[str]:
    """Return the private parts of libraries that a module uses, and the parts that it replaces."""
    libraries = libraries_of(tree)
    parameters = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [path for path in paths_of(node) if any(map(is_private, path.split(".")))]
        elif isinstance(node, ast.FunctionDef):
            is_method = ast.unparse(node.args).startswith(("self", "cls"))
            found += [node.name] if is_method and is_private(node.name) and node.name in INHERITED else []
        elif isinstance(node, ast.Attribute):
            path, owner = ast.unparse(node), ast.unparse(node.value)
            is_own = owner in ("self", "cls", "super()")
            is_replaced = not isinstance(node.ctx, ast.Load) and owner.partition(".")[0] in libraries
            if is_own and is_private(node.attr) and node.attr in INHERITED:
                found.append(path)
            if is_replaced and path not in SETTINGS:
                found.append(path)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            owner, name = node.args[:2]
            path = ast.unparse(owner)
            if isinstance(name, ast.Constant) and is_private(name.value) and path != "self":
                found.append(str(name.value))
            elif ast.unparse(node.func) == "setattr" and path.partition(".")[0] not in parameters:
                found += [] if path in SETTINGS else [path]
    return found


def test_private_parts_of_libraries_are_used_in_one_module_each() -> None:
    found = {path.relative_to(ROOT).as_posix(): uses(ast.parse(path.read_text())) for path in SOURCES}
    assert {name: parts for name, parts in found.items() if parts and name not in MODULES} == {}
    assert all(found[name] for name in MODULES), "a module of the list uses no private part any more"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("import torch._lazy", 1),
        ("from hydra._internal import utils", 1),
        ("super()._load_from_state_dict(state)", 1),
        ("self._buffers['window'] = value", 1),
        ("class Layer(nn.Module):\n    def _apply(self, function): ...", 1),
        ("import torch\ntorch.add = add", 1),
        ("from torch import Tensor\nsetattr(Tensor, name, watched)", 1),
        ("hasattr(torch.ops.mkldnn, '_linear_pointwise')", 1),
        ("class Index:\n    def __init__(self):\n        self._rows = []", 0),
        ("from speechtrain.commands._cli import say", 0),
        ("import sys\nsys.argv = []", 0),
        ("def fill(module):\n    setattr(module, 'window', value)", 0),
    ],
)
def test_a_private_or_replaced_part_is_seen(text: str, count: int) -> None:
    assert len(uses(ast.parse(text))) == count
