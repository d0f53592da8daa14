"""This torch has each private part. The error for a part that moved names it and the version."""

from __future__ import annotations

import _compat_pickle
import platform

import pytest
import torch

from speechtrain import torch_private
from speechtrain.errors import MachineError


@pytest.mark.parametrize("name", torch_private.PARTS)
def test_this_torch_has_the_part(name: str) -> None:
    assert getattr(torch_private, name) is not None


@pytest.mark.parametrize("path", ["torch._moved", "torch._moved.name", "torch.nn.Module._moved"])
def test_a_part_that_is_missing_is_named_with_the_version(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_private.PARTS, "part", path)
    with pytest.raises(MachineError) as raised:
        torch_private.part  # noqa: B018 - it is looked up
    assert str(raised.value) == f"torch {torch.__version__} has no {path}. Install torch 2.7 to 2.14"


def test_a_name_that_is_no_part_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match=r"speechtrain\.torch_private has no moved"):
        torch_private.moved  # noqa: B018 - it is looked up


@pytest.mark.parametrize("name", ["IMPORT_MAPPING", "NAME_MAPPING"])
def test_this_python_has_the_names_of_python_2(name: str) -> None:
    version = platform.python_version()
    assert hasattr(_compat_pickle, name), f"interop/pickles.py: Python {version} has no _compat_pickle.{name}"
