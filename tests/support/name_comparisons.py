"""Finds code that compares names of classes, or devices, with something. The object should answer."""

from __future__ import annotations

import ast
from collections.abc import Iterable

_TARGET = "_target_"
_CLASS_NAMES = ("__name__", "__qualname__", _TARGET)
_OBJECTS = ("device", "backend", "launcher")
_OBJECT_NAMES = ("name", "type", "choice")
_TEXT_TESTS = ("endswith", "startswith", "fullmatch", "match", "search", "removesuffix", "removeprefix")


def name_comparisons(source: str) -> list[int]:
    """Return the lines of Python code that compare the name of a class, or a device, with something."""
    tree = ast.parse(source)
    lines = set(_lines(tree, variables=set()))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines.update(_lines(node, _variables(node)))
    return sorted(lines)


def _lines(scope: ast.AST, variables: set[str]) -> Iterable[int]:
    """Yield the lines of comparisons. ``variables`` hold names of classes."""
    for node in ast.walk(scope):
        operands = _operands(node)
        # The devices of two tensors say where the tensors are.
        if all(getattr(operand, "attr", "") == "device" for operand in operands):
            continue
        if any(_is_class_name(operand, variables) or _is_object(operand) for operand in operands):
            yield node.lineno  # type: ignore[attr-defined]


def _operands(node: ast.AST) -> list[ast.expr]:
    """Return the expressions that a node compares. There are none in other nodes."""
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Match):
        return [node.subject]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TEXT_TESTS:
        return [node.func.value, *node.args]
    return []


def _is_class_name(node: ast.AST, variables: set[str]) -> bool:
    """Return whether the value of an expression is made of the name of a class."""
    if isinstance(node, ast.Name):
        return node.id in variables
    if isinstance(node, ast.Attribute) and node.attr in _CLASS_NAMES:
        return True
    if isinstance(node, ast.Subscript) and _is_target(node.slice):
        return True
    parts = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            if node.func.attr in ("get", "pop") and any(map(_is_target, node.args)):
                return True
            parts = [node.func.value]
        elif getattr(node.func, "id", "") != "str":
            return False  # Another function returns something else than the name.
    return any(_is_class_name(part, variables) for part in parts)


def _is_target(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == _TARGET


def _is_object(node: ast.AST) -> bool:
    """Return whether an expression is a device, a backend or a launcher, or the name of one."""
    if isinstance(node, ast.Attribute) and node.attr in _OBJECT_NAMES:
        node = node.value
    name = getattr(node, "attr", getattr(node, "id", ""))
    return name in _OBJECTS


def _variables(function: ast.AST) -> set[str]:
    """Return the variables of a function that hold names of classes.

    An error's text that falls back to the name of its class is not one.
    """
    names = set()
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or isinstance(node.value, ast.BoolOp):
            continue
        if _is_class_name(node.value, set()):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names
