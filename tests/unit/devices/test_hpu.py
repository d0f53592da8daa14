"""What ``device=hpu`` says and sets where no Gaudi is; what it calls is in the contract's tests."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from speechtrain.compute_policy import STATIC
from speechtrain.devices.hpu import HPU, _write_operations, has_card
from speechtrain.errors import MachineError


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_one_line_says_what_is_missing_how_to_get_it_and_what_rehearses(absent: None) -> None:
    for ask in (HPU().check, HPU().open):
        with pytest.raises(MachineError) as raised:
            ask(0)
        text = str(raised.value)
        assert text.isprintable()
        for part in ("habana_frameworks", "vault.habana.ai/gaudi-docker", "device=lazy"):
            assert part in text
        assert (
            "habana-torch-plugin" not in text
        )  # The index has no such package, so anyone can take the name.


@pytest.mark.slow
@pytest.mark.skipif(os.path.exists("/dev/accel"), reason="accelerators are here, perhaps Gaudi cards")
def test_the_command_ends_with_that_line_before_a_process_or_a_folder_is_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "speechtrain.commands.train", "model=wav2vec2", "data=digits"]
    done = subprocess.run(
        [*command, "device=hpu", "world_size=8", f"run_dir={run}"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == MachineError.exit_code == 4
    assert len(done.stderr.splitlines()) == 1
    assert "habana_frameworks is not installed here" in done.stderr
    assert "device=lazy" in done.stderr
    assert not run.exists()


@pytest.mark.parametrize(
    ("file", "is_card"),
    [
        ("hl0", True),
        ("accel/accel7", True),
        ("hl_controlD0", False),
        ("accel/accel_controlD0", False),
        ("dri/card0", False),
    ],
)
def test_a_card_is_seen_by_its_device_file(file: str, is_card: bool, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    assert has_card(tmp_path) == is_card


@pytest.mark.skipif(os.path.exists("/dev/accel"), reason="accelerators are here, perhaps Gaudi cards")
def test_the_package_without_a_card_is_an_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container of the vendor on a host without a card. The package is not imported."""
    assert HPU().obstacle() == "habana_frameworks is not installed"
    (tmp_path / "habana_frameworks").mkdir()
    (tmp_path / "habana_frameworks" / "__init__.py").write_text("raise RuntimeError\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert HPU().obstacle() == "no Gaudi card"


@pytest.mark.parametrize(
    ("required", "installed", "mode", "fault"),
    [
        ("2.7.1", "2.7.1+hpu_1.22.0", "lazy", ""),
        ("2.9.0\n", "2.9.0a0+git4f2", "lazy", ""),
        ("2.9.0", "2.9.1+cpu", "compile", ""),
        ("2.9.0", "2.9.1+cpu", "eager", ""),
        ("2.9.0", "2.9.1", "lazy", "torch 2.9.1 is not the vendor's build, and mode=lazy needs that"),
        ("2.9.0", "2.9.1+cu128", "lazy", "or set device.mode=compile"),
        ("2.1.0", "2.15.0", "compile", "is built for torch 2.1, and torch 2.15.0 has replaced it"),
        ("2.7.1", "2.15.0+git1", "lazy", "is built for torch 2.7, and torch 2.15.0+git1 has replaced it"),
        ("", "2.15.0", "lazy", ""),
    ],
)
def test_a_torch_that_replaced_the_vendors_is_refused(
    required: str,
    installed: str,
    mode: str,
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bridge refuses the same versions when it is imported, so the command must not get as far."""
    package = tmp_path / "habana_frameworks"
    (package / "torch").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError\n")
    if required:  # a bridge without the file
        (package / "torch" / "required_version.txt").write_text(required)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch, "__version__", installed)
    device = HPU(mode)
    assert fault in device.library_fault()
    if not fault:
        device.check(1)
        return
    with pytest.raises(MachineError, match=r"^device=hpu: ") as raised:
        device.open(0)
    text = str(raised.value)
    assert fault in text
    assert "--no-deps" in text
    assert text.isprintable()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"mode": "graph"}, r"^mode is"),
        ({"recipe_cache_mib": 0}, r"^recipe_cache_mib is"),
        ({"graphs_kept": 0}, r"^graphs_kept is"),
        ({"recipe_cache": "/a,b"}, r"^recipe_cache is"),
        ({"bf16_ops": ["mm"], "fp32_ops": ["mm"]}, "both name mm"),
    ],
)
def test_wrong_values_name_their_key(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        HPU(**arguments)  # type: ignore[arg-type]


def test_what_it_declares() -> None:
    device = HPU()
    narrow = replace(STATIC, autocast_dtype=torch.bfloat16, product_dtype=torch.bfloat16, lattice_cells=65536)
    assert device.policy(torch.bfloat16) == replace(narrow, lstm_segment=80)
    assert HPU("compile").policy(torch.bfloat16) == narrow
    assert "out of one card's memory" in device.precision_fallback_reason(torch.float32)
    assert device.facts.backends == "hpu:hccl"
    assert not device.supports(torch.float16)
    assert device.graphs() == 0  # before it is open


def test_a_file_of_operations_has_a_new_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = _write_operations("OPS", ["mm", "linear"]), _write_operations("OPS", ["mm"])
    assert first != second
    assert Path(first).read_text() == "mm\nlinear\n"
    assert stat.S_IMODE(Path(first).stat().st_mode) == 0o600
