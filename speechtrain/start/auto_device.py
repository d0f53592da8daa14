"""The choice ``device=auto``: the first of cuda, hpu and cpu that this host can use, and the reason."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from speechtrain.errors import ConfigError
from speechtrain.files import print_line
from speechtrain.launch.launcher import Launcher
from speechtrain.overrides import key_of_override
from speechtrain.start.choices import choices
from speechtrain.start.run_config import part_of

AUTO = "auto"
VARIABLE = "SPEECHTRAIN_DEVICE"
"""Environment variable with the device that ``auto`` means. If not set, the first usable device is chosen."""


@dataclass(frozen=True)
class AutoDevice:
    """The device that ``auto`` means on this host, and the reason in few words."""

    name: str  # a choice of the group ``device``, such as cuda
    reason: str
    is_explicit: bool = False  # true: the user has set the environment variable

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
    """Return the first usable device of this host. Its driver is loaded once in each process."""
    from speechtrain.devices.cuda import CUDA  # imports torch
    from speechtrain.devices.hpu import HPU

    return first_usable({"cuda": CUDA().obstacle(), "hpu": HPU().obstacle()})


def first_usable(obstacles: Mapping[str, str]) -> AutoDevice:
    """Return the first device without an obstacle, or the CPU if each device has one.

    ``obstacles`` has, for each device in the order of preference, the reason why the device is not usable. An
    empty text means that it is usable.
    """
    reasons: list[str] = []
    for name, obstacle in obstacles.items():
        if not obstacle:
            return AutoDevice(name, ", ".join([*reasons, f"{name} is usable"]))
        reasons.append(obstacle)
    return AutoDevice("cpu", ", ".join(reasons))


def may_be_auto(overrides: Sequence[str]) -> bool:
    """Return whether a run of the command with ``overrides`` may have ``device=auto``."""
    device_overrides = [text for text in overrides if key_of_override(text) == "device"]
    return not device_overrides or AUTO in device_overrides[-1]


def offer_auto(overrides: Sequence[str], config_dir: str | None) -> None:
    """Register the choice ``device=auto`` with Hydra.

    If ``overrides`` choose other devices, no run has this choice. Hydra still composes it for the config of a
    whole sweep, so it is then the CPU, which loads no driver. Raises ConfigError if the environment variable
    does not name a device.
    """
    name = "cpu"
    if may_be_auto(overrides):
        name = auto_device().name
    names = choices(config_dir)["device"]
    if name not in names:
        raise ConfigError(f"{VARIABLE}={name}: the devices are {', '.join(names)}")
    ConfigStore.instance().store(group="device", name=AUTO, node={"defaults": [name]})


def check_launcher(group_choices: Mapping[str, Any], config: DictConfig) -> None:
    """Raise ConfigError for ``device=auto`` if the launcher may start ranks on other hosts.

    This host does not know the devices of other hosts. ``group_choices`` has the choice of each group.
    """
    if group_choices.get("device") != AUTO or auto_device().is_explicit:
        return
    launcher = part_of(config, "launcher").build()
    if not launcher.is_here:
        problem = f"launcher={launcher.choice} may start ranks on other hosts, whose devices are unknown here"
        raise ConfigError(f"{problem}. Add device=cpu, cuda or hpu")


def announce_auto(
    group_choices: Mapping[str, Any], config: DictConfig, external_launch: Launcher | None
) -> None:
    """Print the device that ``device=auto`` means, unless the user has set the environment variable.

    ``external_launch`` is set if another program has started the ranks, so that ``config.launcher`` is not
    used. Otherwise this raises ConfigError as ``check_launcher`` does.
    """
    if group_choices.get("device") != AUTO:
        return  # auto_device() would load the drivers of accelerators, which takes time.
    device = auto_device()
    if device.is_explicit:
        return
    if external_launch is None:
        check_launcher(group_choices, config)
    if config.dry_run:
        print(device, file=sys.stderr)  # The stdout of a dry run has shell lines only.
    else:
        print_line(str(device))


def check_same_device(group_choices: Mapping[str, Any], name: str) -> None:
    """Raise ConfigError if ``device=auto`` means another device on this host than on the first one.

    ``name`` is the device on the host where the sweep started.
    """
    if group_choices.get("device") != AUTO:
        return
    auto = auto_device()
    if auto.name != name:
        problem = f"device=auto is {name} where the sweep started, and not on this host ({auto})"
        raise ConfigError(f"{problem}. Add device=NAME")
