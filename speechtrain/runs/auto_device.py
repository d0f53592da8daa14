"""The choice ``auto`` of the device: the first device of this host that is usable, and the reason."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from speechtrain.config.build import build_launcher
from speechtrain.config.resume_fields import key_of_override
from speechtrain.errors import ConfigError
from speechtrain.files import print_line
from speechtrain.launcher import Job, Launcher
from speechtrain.runs.choices import choices

AUTO = "auto"
VARIABLE = "SPEECHTRAIN_DEVICE"
"""Environment variable: the device that ``auto`` means. Without it, the first usable device is chosen."""


@dataclass(frozen=True)
class AutoDevice:
    """The device that ``auto`` means on this host, and the reason in few words."""

    name: str
    reason: str
    is_explicit: bool = False  # The user has set it in the environment.

    def __str__(self) -> str:
        return f"device: {self.name} ({self.reason})"


def auto_device() -> AutoDevice:
    """Return the device that ``auto`` means in this process."""
    name = os.environ.get(VARIABLE, AUTO)
    if name in ("", AUTO):
        return _usable_device()
    return AutoDevice(name, f"{VARIABLE} is set", is_explicit=True)


@cache
def _usable_device() -> AutoDevice:
    from speechtrain.devices.cuda import CUDA  # torch
    from speechtrain.devices.hpu import HPU

    return first_usable({"cuda": CUDA().obstacle(), "hpu": HPU().obstacle()})


def first_usable(obstacles: Mapping[str, str]) -> AutoDevice:
    """Return the first device that has no obstacle, in the order of ``obstacles``, or else the CPU."""
    reasons: list[str] = []
    for name, obstacle in obstacles.items():
        if not obstacle:
            return AutoDevice(name, ", ".join([*reasons, f"{name} is usable"]))
        reasons.append(obstacle)
    return AutoDevice("cpu", ", ".join(reasons))


def offer_auto(overrides: Sequence[str], config_dir: str | None) -> None:
    """Set Hydra's choice ``device=auto`` unless ``overrides`` choose another device.

    Raises ConfigError for a variable that names no device.
    """
    device_overrides = [text for text in overrides if key_of_override(text) == "device"]
    if device_overrides and AUTO not in device_overrides[-1]:
        return  # The driver of no device has to be loaded.
    choice, names = auto_device().name, choices(config_dir)["device"]
    if choice not in names:
        raise ConfigError(f"{VARIABLE}={choice}: the devices are {', '.join(names)}")
    ConfigStore.instance().store(group="device", name=AUTO, node={"defaults": [choice]})


def check_launcher(group_choices: Mapping[str, Any], config: DictConfig) -> None:
    """Raise ConfigError for ``auto`` with a launcher of other hosts, because their devices are unknown here.

    ``group_choices`` holds the choice of each group.
    """
    if group_choices.get("device") != AUTO or auto_device().is_explicit:
        return
    launcher = build_launcher(config)
    if not launcher.is_here(Job(Path(), Path(), world_size=config.world_size)):
        problem = f"launcher={launcher.choice} may start ranks on other hosts, whose devices are unknown here"
        raise ConfigError(f"{problem}. Add device=cpu, cuda or hpu")


def announce_auto(group_choices: Mapping[str, Any], config: DictConfig, ranks: Launcher | None) -> None:
    """Print the device that ``auto`` means, unless the user has set it. Raises as ``check_launcher``.

    ``ranks`` are the ranks that another program has started. Then no launcher starts any. A dry run prints
    shell lines on stdout, so its line is on stderr.
    """
    device = auto_device()
    if group_choices.get("device") != AUTO or device.is_explicit:
        return
    if ranks is None:
        check_launcher(group_choices, config)
    if config.dry_run:
        print(device, file=sys.stderr)
    else:
        print_line(str(device))


def check_same_device(group_choices: Mapping[str, Any], name: str) -> None:
    """Raise ConfigError if ``auto`` is another device here than ``name``, the one where the sweep started."""
    auto = auto_device()
    if group_choices.get("device") == AUTO and auto.name != name:
        problem = f"device=auto is {name} where the sweep started, and not on this host ({auto})"
        raise ConfigError(f"{problem}. Add device=NAME")
