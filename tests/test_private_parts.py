"""One module uses the private parts of a library. No other module replaces a part of a library."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "speechtrain").rglob("*.py"), *(ROOT / "launchers").rglob("*.py")])

MODULES = {
    "speechtrain/torch_private.py": "torch",
    "speechtrain/files.py": "the names of Python 2 in _compat_pickle",
}
"""Modules that use private parts of a library: which library."""
DOCUMENTED = {"_target_", "_fields", "_replace", "_exit", "_current_frames"}
"""Names with an underscore that Hydra and Python document."""
SETTINGS = {
    "sys",
    "sys.argv",
    "os.environ",
    "logging.raiseExceptions",
    "logging.getLogger('speechtrain').propagate",
    "torch.backends.cudnn.allow_tf32",
}
"""Attributes of libraries that are there to be set."""


@cache  # Not at the import, which each process of a parallel run makes.
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each module, by its path."""
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in SOURCES}


@cache
def inherited_names() -> set[str]:
    """Return the names of the classes of torch that classes of the package are derived from."""
    return {*dir(nn.Module()), *dir(torch.optim.SGD([torch.zeros(1)])), *dir(torch.autograd.Function)}


def is_private(name: object) -> bool:
    is_text = isinstance(name, str) and name.isidentifier()
    return is_text and name.startswith("_") and not name.endswith("__") and name not in DOCUMENTED


def defined_names(tree: ast.AST) -> set[str]:
    """The names of functions, classes, variables and attributes of ``self`` that a module defines."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            names |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return names - inherited_names()


@cache
def package_names() -> set[str]:
    """Return the names that any module of the package defines."""
    return set().union(*map(defined_names, trees().values()))


def imported_names(tree: ast.AST) -> set[str]:
    """The names by which a module knows libraries and their parts."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and not is_of_package(node):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def is_of_package(node: ast.Import | ast.ImportFrom) -> bool:
    return isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "speechtrain"


class Uses(ast.NodeVisitor):
    """The private parts of libraries that a module uses, and the parts that it replaces."""

    def __init__(self, tree: ast.AST) -> None:
        self.names = defined_names(tree)
        self.libraries = imported_names(tree)
        self.parameters = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        self.places: list[str] = []
        self.visit(tree)

    def add(self, node: ast.stmt | ast.expr, part: str) -> None:
        self.places.append(f"{node.lineno}: {part}")

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        paths = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{path}" for path in paths]
        for path in paths:
            if not is_of_package(node) and any(map(is_private, path.split("."))):
                self.add(node, path)

    visit_ImportFrom = visit_Import

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        is_method = ast.unparse(node.args).startswith(("self", "cls"))
        if is_private(node.name) and is_method and node.name in inherited_names():
            self.add(node, node.name)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = ast.unparse(node.value)
        names = package_names() if owner in ("self", "cls", "super()") else self.names
        if is_private(node.attr) and node.attr not in names:
            self.add(node, ast.unparse(node))
        if not isinstance(node.ctx, ast.Load):
            self.check_setting(node, ast.unparse(node), owner.partition(".")[0] in self.libraries)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = ast.unparse(node.func)
        if function in ("getattr", "hasattr", "setattr", "delattr"):
            owner, name = node.args[:2]
            if isinstance(name, ast.Constant) and is_private(name.value) and name.value not in self.names:
                self.add(node, str(name.value))
            if function in ("setattr", "delattr"):
                path = ast.unparse(owner)
                self.check_setting(node, path, path.partition(".")[0] not in self.parameters)
        self.generic_visit(node)

    def check_setting(self, node: ast.expr, path: str, is_of_library: bool) -> None:
        if is_of_library and path not in SETTINGS:
            self.add(node, path)


def test_private_parts_of_libraries_are_used_in_one_module_each() -> None:
    uses = {name: Uses(tree).places for name, tree in trees().items()}
    assert {name: places for name, places in uses.items() if places and name not in MODULES} == {}
    assert all(uses[name] for name in MODULES), "a module of the list uses no private part any more"


@pytest.mark.parametrize(
    "text",
    [
        "import torch._lazy",
        "from hydra._internal import utils",
        "value = node._get_node(key)",
        "torch._foreach_mul_(gradients, scale)",
        "super()._load_from_state_dict(state)",
        "self._buffers['window'] = value",
        "class Layer(nn.Module):\n    def _apply(self, function): ...",
        "import torch\ntorch.add = add",
        "from torch import Tensor\nsetattr(Tensor, name, watched)",
        "for module in (source, backend):\n    setattr(module, 'run', refuse)",
    ],
)
def test_a_private_or_replaced_part_is_seen(text: str) -> None:
    assert len(Uses(ast.parse(text)).places) == 1


@pytest.mark.parametrize(
    "text",
    [
        "class Index:\n    def __init__(self):\n        self._rows = []\nlen(index._rows)",
        "from speechtrain.commands._cli import say",
        "import sys\nsys.argv = []",
        "def fill(module):\n    setattr(module, 'window', value)",
    ],
)
def test_a_public_part_is_allowed(text: str) -> None:
    assert Uses(ast.parse(text)).places == []
