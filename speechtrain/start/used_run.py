"""The stored config of a run that is used, for example to transcribe, with the changes for this use."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from speechtrain.errors import ConfigError
from speechtrain.overrides import key_of_override
from speechtrain.start.auto_device import AUTO, auto_device
from speechtrain.start.build import build_data
from speechtrain.start.run_config import RunConfig, part_of, run_config
from speechtrain.start.stored import read_config
from speechtrain.start.stored_config import apply_overrides, relocate, set_group, set_key

if TYPE_CHECKING:
    from speechtrain.data.base import DataModule
    from speechtrain.decoding.base import Decoder
    from speechtrain.task import Task
    from speechtrain.text.vocabulary import Tokenizer


@dataclass(frozen=True)
class UsedRun:
    """The config of a run for use."""

    run: RunConfig
    device_line: str  # the line of the log if another device replaces the run's device, else ""
    longest_pause: float | None  # ``data.longest_pause`` in seconds, None if the data has no such key
    channel: int | None  # ``data.channel`` of recordings, None for the mean of all
    max_decoded_seconds: float | None  # ``data.max_decoded_seconds`` if an override sets it
    _config: DictConfig

    def decoder(self, choice: str, options: Mapping[str, Any]) -> Decoder:
        """Return the decoder ``choice``, by default the run's, with the keys ``options``.

        Raises ConfigError for an unknown choice or key.
        """
        config = copy.deepcopy(self._config)
        if choice:
            set_group(config, "decoder", choice, None)
        for key, value in options.items():
            set_key(config, f"decoder.{key}", value)
        decoder: Decoder = part_of(config, "decoder").build()
        return decoder

    def evaluation_data(self, sets: Mapping[str, str], tokenizer: Tokenizer, task: Task) -> DataModule:
        """Return the data of an evaluation. ``sets``, by their names, replace the run's evaluation sets.

        The training set is opened only if a part of it is held out. Raises ConfigError if there is no
        evaluation set.
        """
        run, data = self.run, self.run.data
        if "valid" in data.node:
            named_sets = dict(sets) or data.node["valid"]
            if not named_sets and not data.node.get("hold_out"):
                raise ConfigError(f"{self.run.run_dir} has no evaluation set. Give one with --set NAME=FILE")
            run = run.with_data(valid=named_sets)
            if named_sets and data.part_class.train_is_optional:
                run = run.with_data(train="")  # Without a path, the training set is not opened.
        elif sets:
            name = data.part_class.__name__
            raise ConfigError(f"--set: {name} takes no evaluation set. Remove --set")
        return build_data(run, tokenizer, task)


def read_used_run(run_dir: Path, overrides: Sequence[str], config_dir: str | None = None) -> UsedRun:
    """Return the run in ``run_dir`` with ``overrides``, KEY=VALUE texts for this use.

    They may also choose another device, precision or decoder, also from the folder ``config_dir``. Without a
    choice of the device, the run's device is used if this host has it, otherwise ``device=auto``. Raises
    ConfigError for a key that the config lacks, and the errors of ``read_config``.
    """
    config = read_config(run_dir)
    # None means that any stored ``run_dir`` is replaced. The run may have been moved to ``run_dir``.
    relocate(config, None, str(run_dir.resolve()))
    if "cache" in config.data:
        config.data.cache = None  # Commands that use a run do not write to its cache.
    device_line = _apply_overrides(config, overrides, config_dir)
    max_decoded_seconds = None
    # The run's own value of this key is for evaluation sets, so only an override counts.
    if "data.max_decoded_seconds" in map(key_of_override, overrides):
        max_decoded_seconds = float(config.data.max_decoded_seconds)
    return UsedRun(
        run_config(config),
        device_line,
        longest_pause=config.data.get("longest_pause"),
        channel=config.data.get("channel"),
        max_decoded_seconds=max_decoded_seconds,
        _config=config,
    )


def _apply_overrides(config: DictConfig, overrides: Sequence[str], config_dir: str | None) -> str:
    """Apply ``overrides`` to ``config``. Return the log line of ``device=auto``, empty if it is not used.

    - ``device=auto`` replaces a device that this host lacks, unless ``overrides`` choose the device.
    - If the replacement does not support the run's precision, fp32 replaces the precision, unless
      ``overrides`` choose the precision.
    """
    choices = {}
    device_overrides = []
    other_overrides = []
    for override in overrides:
        key = key_of_override(override)
        _, _, choices[key] = override.partition("=")
        if key.startswith("device."):
            device_overrides.append(override)
        else:
            other_overrides.append(override)
    apply_overrides(config, other_overrides, config_dir)
    line = ""
    if choices.get("device") == AUTO:
        line = str(auto_device())
    elif "device" not in choices and part_of(config, "device").build().obstacle():
        set_group(config, "device", AUTO, config_dir)
        line = str(auto_device())
        dtype = part_of(config, "precision").build().dtype
        if "precision" not in choices and not part_of(config, "device").build().supports(dtype):
            set_group(config, "precision", "fp32")
            line += ", precision=fp32"
    # The device's keys are set last, because a new choice of the device replaces all its keys.
    apply_overrides(config, device_overrides)
    return line
