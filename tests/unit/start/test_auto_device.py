"""Tests of ``device=auto``: which device it means, when it is refused, and that a run keeps its device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from speechtrain.commands import evaluate, train
from speechtrain.errors import ConfigError, MachineError
from speechtrain.inference.loaded_run import load
from speechtrain.launch.launcher import Job, Launcher, LaunchResult
from speechtrain.start.auto_device import (
    VARIABLE,
    _usable_device,
    auto_device,
    check_launcher,
    check_same_device,
    first_usable,
)
from speechtrain.start.command_line import read_command
from speechtrain.start.compose import compose, compose_with_choices
from speechtrain.start.resolved import dump
from speechtrain.start.resolved import load as load_config
from speechtrain.start.resume import config_to_continue
from tests.support.tiny_run import TINY, untrained

HOST_LINE = "device: cpu (no CUDA device, habana_frameworks is not installed)"
"""The line of ``device=auto`` on a host without accelerators."""
NO_THREADS = [text for text in TINY if text != "device.threads=1"]
"""Keys of a tiny run on any device."""
REMOTE_LAUNCHERS = ("ssh", "slurm", "mpi", "kubernetes")


class Plugin(Launcher):
    """A launcher from a user's package. It does not set ``is_here``."""

    def launch(self, job: Job) -> LaunchResult:
        return LaunchResult(0)

    def render(self, job: Job) -> str:
        return "nothing"


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variable of the test suite, and skip the test on a host with an accelerator."""
    monkeypatch.delenv(VARIABLE)
    if auto_device().name != "cpu":
        pytest.skip("this host has an accelerator")


# --- the choice -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "hpu", "line"),
    [
        ("", "", "device: cuda (cuda is usable)"),
        ("", "no Gaudi card", "device: cuda (cuda is usable)"),
        ("no CUDA device", "", "device: hpu (no CUDA device, hpu is usable)"),
        ("no CUDA device", "no Gaudi card", "device: cpu (no CUDA device, no Gaudi card)"),
    ],
)
def test_cuda_comes_before_gaudi_and_gaudi_before_the_cpu(cuda: str, hpu: str, line: str) -> None:
    assert str(first_usable({"cuda": cuda, "hpu": hpu})) == line


def test_a_variable_sets_the_device_in_place_of_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "lazy")
    assert str(auto_device()) == "device: lazy (SPEECHTRAIN_DEVICE is set)"
    assert compose([]).device._target_.endswith(".Lazy")
    assert compose(["device=cpu"]).device._target_.endswith(".CPU")
    monkeypatch.setenv(VARIABLE, "gpu")
    with pytest.raises(ConfigError, match=r"^SPEECHTRAIN_DEVICE=gpu: the devices are cpu, "):
        compose(["device=auto"])
    assert compose(["device=cpu"]), "an explicit device does not read it"
    for text in ("", "auto"):
        monkeypatch.setenv(VARIABLE, text)
        assert auto_device() is _usable_device()


@pytest.mark.parametrize("device", ["cpu", "cuda", "hpu"])
def test_the_choice_is_made_before_composing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The YAML of a device also sets precision and shapes, which a recipe or the command may replace."""
    monkeypatch.setenv(VARIABLE, device)
    for overrides in ([], ["recipe=demo"], ["precision=fp32", "data.shapes=2"]):
        assert compose(overrides) == compose([*overrides, f"device={device}"])
        assert compose([*overrides, "device=auto"]) == compose([*overrides, f"device={device}"])


# --- launchers --------------------------------------------------------------------------------------


def error_text(*overrides: str) -> str:
    """Return the error of ``check_launcher`` for a command on two ranks, or an empty text."""
    config, group_choices, _ = compose_with_choices([*overrides, "world_size=2"])
    try:
        check_launcher(group_choices, config)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", REMOTE_LAUNCHERS)
def test_a_launcher_of_other_hosts_needs_an_explicit_device(
    launcher: str, no_accelerator: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("a\nb\n")
    keys = [f"launcher={launcher}"]
    if launcher == "kubernetes":
        keys.append("launcher.image=i")
    line = (
        f"launcher={launcher} may start ranks on other hosts, whose devices are unknown here. "
        "Add device=cpu, cuda or hpu"
    )
    assert error_text(*keys) == error_text(*keys, "device=auto") == line
    assert error_text(*keys, "device=cpu") == error_text(*keys, "recipe=intel_rnnt") == ""
    monkeypatch.setenv(VARIABLE, "cpu")
    assert error_text(*keys) == ""


def test_a_launcher_of_a_package_is_remote_without_is_here(
    no_accelerator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEECHTRAIN_ALLOW_TARGETS", __name__)
    config, group_choices, _ = compose_with_choices([])
    config.launcher = OmegaConf.create({"_target_": f"{__name__}.Plugin"})
    with pytest.raises(ConfigError, match="launcher=plugin may start ranks on other hosts"):
        check_launcher(group_choices, config)
    monkeypatch.setattr(Plugin, "is_here", True)
    check_launcher(group_choices, config)


# --- runs -------------------------------------------------------------------------------------------


@pytest.fixture
def working_folder(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_first_line_is_the_device_and_the_run_keeps_it(
    no_accelerator: None,
    working_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    overrides = [*TINY, "tracking=none", "launcher=local", "launcher.inline=true"]
    assert train.run(overrides) == 0
    assert capfd.readouterr().out.splitlines()[0] == HOST_LINE
    (run_dir,) = Path("runs").iterdir()
    monkeypatch.setenv(VARIABLE, "lazy")  # as on a host whose device is another one
    command = read_command(overrides)
    config = config_to_continue(run_dir.resolve(), command)
    assert config.device._target_ == "speechtrain.devices.cpu.CPU"
    assert HOST_LINE not in capfd.readouterr().out


@pytest.mark.slow
def test_a_sweep_over_devices_trains_each_job(
    working_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = [*NO_THREADS, "tracking=none", "launcher=local", "launcher.inline=true", "data.shapes=2"]
    assert train.run([*own, "-m", "device=cpu,lazy"]) == 0, capfd.readouterr().err
    devices = [json.loads(path.read_text())["device"] for path in sorted(Path("runs").glob("*/run.json"))]
    assert sorted(devices) == ["cpu", "lazy"]
    steps = [json.loads(path.read_text())["steps"] for path in Path("runs").glob("*/result.json")]
    assert steps == [2, 2]


def test_check_same_device_refuses_a_job_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "cuda")
    check_same_device({"device": "auto"}, "cuda")
    check_same_device({"device": "cpu"}, "hpu")
    with pytest.raises(
        ConfigError, match=r"device=auto is cpu where the sweep started, and not on this host \(device: cuda"
    ):
        check_same_device({"device": "auto"}, "cpu")


# --- trained runs -----------------------------------------------------------------------------------


@pytest.fixture
def gpu_run(cache: Path, tmp_path: Path) -> Path:
    """Return a run of a device that is absent here, in a precision that the CPU lacks."""
    if torch.cuda.is_available():
        pytest.skip("this host has a GPU")
    run_dir = untrained(tmp_path / "run", *TINY)
    config = load_config(run_dir / "config.yaml")
    gpu_config = compose(["device=cuda", "precision=fp16"])
    config.device, config.precision = gpu_config.device, gpu_config.precision
    (run_dir / "config.yaml").write_text(dump(config))
    return run_dir


FALLBACK = f"{HOST_LINE}, precision=fp32"


@pytest.mark.slow
def test_evaluate_uses_device_auto_for_an_absent_device(
    gpu_run: Path, no_accelerator: None, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.run([str(gpu_run), "device.threads=1", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["metrics"]
    assert caplog.messages[0] == FALLBACK
    caplog.clear()
    assert evaluate.run([str(gpu_run), "precision=bf16", "--json"]) == 0
    assert caplog.messages[0] == HOST_LINE


@pytest.mark.slow
def test_an_explicit_device_is_used_or_refused(gpu_run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(MachineError, match="device=cuda: "):
        load(gpu_run, "device=cuda")
    with pytest.raises(MachineError, match="precision=fp16: device=cpu does not train in it"):
        load(gpu_run, "device=cpu")
    assert load(gpu_run, "device=cpu", "precision=fp32", "device.threads=1").opened.device.name == "cpu"
    assert not caplog.messages
