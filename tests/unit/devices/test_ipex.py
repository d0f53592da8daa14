"""Where Intel's extension is missing or does not fit, one line says so."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from speechtrain.devices import ipex
from speechtrain.devices.ipex import IPEX
from speechtrain.errors import MachineError

FITTING = ".".join(torch.__version__.split(".")[:2]) + ".7+cpu"


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def found(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)


def refusal() -> str:
    with pytest.raises(MachineError) as raised:
        IPEX().open(0)
    text = str(raised.value)
    assert "\n" not in text
    assert "pip install torch==2.8.0" in text
    assert "device=cpu" in text
    return text


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    assert "is not installed" in refusal()


def test_it_says_which_torch_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "1.13.0+cpu")
    assert f"needs torch 1.13, not {torch.__version__}" in refusal()


def test_it_says_why_it_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError("libipex.so:\nno such file")

    installed(monkeypatch, FITTING)
    monkeypatch.setattr(ipex, "importlib", SimpleNamespace(import_module=fail))
    assert "does not load (libipex.so: no such file)" in refusal()


def test_it_is_a_cpu_otherwise() -> None:
    assert IPEX(threads=2).environment(1)["OMP_NUM_THREADS"] == "2"
    assert IPEX().name == torch.device("cpu").type
    assert ipex._release("2.8.0+cpu") == "2.8"


def test_weights_are_left_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the extension is asked for; what it then does is held where it is installed."""
    asked = {}

    class Extension:
        @staticmethod
        def optimize(module: nn.Module, **keys: object) -> tuple[nn.Module, object]:
            asked.update(keys)
            return module, keys["optimizer"]

    monkeypatch.setattr(ipex, "_import", lambda: Extension)
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    assert IPEX().prepare(module, optimizer) == (module, optimizer)
    assert asked == {"optimizer": optimizer, "inplace": True, "weights_prepack": False}
