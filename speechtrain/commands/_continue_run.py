"""The config of a run that continues: its stored config, with the overrides that are new in this start."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from speechtrain.commands._choices import config_dir
from speechtrain.commands._find_run import find_run, text_of
from speechtrain.commands._hydra_app import compose, explain, options
from speechtrain.commands._load_run import choose, own_config, set_key, stored_value
from speechtrain.config.resolved import resolved
from speechtrain.config.resume_fields import PER_START, flat, is_volatile, key_of
from speechtrain.config.schema import INTERFACES
from speechtrain.errors import ConfigError, RunError, first_line
from speechtrain.run_directory import CONFIG, read_about

_NOT_ONE_RUN = {"-m", "--multirun", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
_BATCH_KEYS = ("world_size", "trainer.accumulate", "trainer.simulate_world")
_SHOWN = 3  # keys in a message


def run_to_continue(argv: Sequence[str], run_dir: Path | None) -> Path | None:
    """The existing run that a command line continues; None for a new run, a sweep and for no training."""
    flags, overrides = options(argv)
    if _NOT_ONE_RUN & {flag.partition("=")[0] for flag in flags} or any(o[:5] == "hydra" for o in overrides):
        return None
    if run_dir is None:
        found = find_run(overrides, config_dir(argv))
        return found.resolve() if found else None
    return run_dir if (run_dir / CONFIG).is_file() else None


def continued(
    run_dir: Path, overrides: Sequence[str], folder: str | None, world_size: int | None = None
) -> DictConfig:
    """The config of the run in ``run_dir`` for this start, on ``world_size`` ranks if that is given.

    An override with the same text in the run's ``run.json`` changes nothing: the stored value is used.
    Another override is applied if its key may change. Raises RunError, which names the key, if it may
    not, and ConfigError for a world size that does not divide the micro-batches of an update.
    """
    config, about = own_config(run_dir), read_about(run_dir)
    config.resume, config.dry_run = "auto", False
    new = [text for text in overrides if text not in about["overrides"] or key_of(text) in PER_START]
    changes = dict([*_rewritten(folder, about["written"]), *_parsed(new)])
    changes.pop("run_dir", None)
    shares = {key: changes.pop(key) for key in _BATCH_KEYS if key in changes}
    if world_size is not None:
        shares["world_size"] = world_size
    refused = _share_out(config, shares, run_dir)
    for key, value in changes.items():
        if key in (*INTERFACES, "recipe"):
            if is_volatile(key):
                choose(config, key, str(value))
            else:
                refused.append(f"{key}={value} was not typed when the run started")
        elif is_volatile(key):
            set_key(config, key, value)
        elif (before := stored_value(config, key)) != value:
            refused.append(f"{key}: {before} in the run, {value} now")
    if refused:
        raise RunError(f"{run_dir} belongs to another config ({_shown(refused)}); set another run_dir")
    _say_what_is_kept(run_dir, config, [*about["overrides"], *new], folder)
    return config


def _shown(items: Sequence[str]) -> str:
    return "; ".join(items[:_SHOWN]) + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")


def _parsed(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Key and value of each KEY=VALUE, in Hydra's grammar. Raises ConfigError."""
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            raise explain(error, list(overrides)) from None
        if override.is_sweep_override():
            raise ConfigError(f"{text}: several values are a sweep: add -m; a list is {key_of(text)}=[…]")
        if override.is_delete():
            raise ConfigError(f"{text}: no key of a run can be removed; omit it, or set another run_dir")
        yield key_of(text), override.value()


def _rewritten(folder: str | None, before: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """The keys whose values the user has changed in his own YAML files since the run started."""
    for name, old in before.items():
        new = text_of(folder, name) or old
        try:
            was, now = (flat(dict(OmegaConf.create(text))) for text in (old, new))
        except (OmegaConfBaseException, ValueError) as error:
            raise ConfigError(f"{name}.yaml cannot be read: {first_line(error)}") from None
        prefix = "" if "@package _global_" in new else name.partition("/")[0] + "."
        yield from ((prefix + key, now.get(key)) for key in {**was, **now} if was.get(key) != now.get(key))


def _share_out(config: DictConfig, changes: Mapping[str, Any], run_dir: Path) -> list[str]:
    """Keep the micro-batches per update on another world size; returns the typed keys that contradict."""
    typed_config = copy.deepcopy(config)
    for key, value in changes.items():
        set_key(typed_config, key, value)  # raises ConfigError for a value of another type
    trainer, world = config.trainer, typed_config.world_size
    if world < 1:
        raise ConfigError(f"world_size={world}: it must be at least 1")
    total = int(trainer.simulate_world or config.world_size * trainer.accumulate)
    typed = {key: value for key, value in changes.items() if key != "world_size"}
    wanted = typed.get("trainer.simulate_world") or world * typed.get("trainer.accumulate", 0)
    if typed and wanted != total:
        return [f"{key}: {stored_value(config, key)} in the run, {value} now" for key, value in typed.items()]
    if total % world:
        raise ConfigError(
            f"{run_dir} has {total} micro-batches per update, which world_size={world} does not divide; "
            "set another world_size or run_dir"
        )
    if world != config.world_size:
        config.world_size, trainer.simulate_world, trainer.accumulate = world, total, total // world
    return []


def _say_what_is_kept(run_dir: Path, config: DictConfig, typed: Sequence[str], folder: str | None) -> None:
    """Print one line if a new run with these overrides would have other values than this run."""
    own = flat(resolved(config))
    try:
        new = flat(resolved(compose(list(typed), folder)))
        kept = [
            f"{key}={own[key]}" for key in own if key in new and not _is_place(key) and new[key] != own[key]
        ]
    except (HydraException, OmegaConfBaseException, ConfigError):  # a key that this release does not have
        kept = ["configuration"]
    if kept:
        print(f"{run_dir}: the run keeps its {_shown(kept)}; a new run would differ", flush=True)


def _is_place(key: str) -> bool:
    """True for a key whose value follows from the run's folder or its number of ranks."""
    return key.endswith("run_dir") or key in (*_BATCH_KEYS, "tokenizer.model")
