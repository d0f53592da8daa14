"""The choices that every contract suite runs over: ours, and those of the packages in ``examples/``.

If the variable ``SPEECHTRAIN_PARTS`` names the folder of choices of another package, these alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import DictConfig

from speechtrain.config.targets import ALLOW_TARGETS
from speechtrain.runs.compose import compose

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
PARTS = os.environ.get("SPEECHTRAIN_PARTS", "")
PLUGINS = sorted((ROOT / "examples").glob("*/conf"))
FOLDERS = [CONF, *PLUGINS]
if PARTS:
    FOLDERS = PLUGINS = [Path(PARTS).resolve()]
ALL = sorted(
    (path.parent.name, path.stem)
    for conf in FOLDERS
    for path in conf.glob("*/[!_]*.yaml")
    if path.parent.name != "corpus"  # of speechtrain prepare: no group of a run
)


def choices(group: str) -> list[str]:
    return [name for folder, name in ALL if folder == group]


def folder_of(group: str, choice: str) -> list[str]:
    """The folder of choices that has this one; empty if it is ours."""
    return [str(conf) for conf in PLUGINS if (conf / group / f"{choice}.yaml").is_file()]


def composed(group: str, choice: str, *overrides: str) -> DictConfig:
    """The config with a choice, from the folder that has it."""
    return compose([f"{group}={choice}", *overrides], *folder_of(group, choice))


@pytest.fixture(scope="module", autouse=True)
def plugins_are_importable() -> Iterator[None]:
    """In this process and in those that it starts."""
    folders = [str(conf.parent) for conf in PLUGINS]
    names = [os.environ.get(ALLOW_TARGETS, "")]
    for folder in map(Path, folders):
        names += [path.parent.name for path in folder.glob("*/__init__.py")]
        names += [path.stem for path in folder.glob("*.py")]
    with pytest.MonkeyPatch.context() as patch:
        for folder in folders:
            patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")])))
        patch.setenv(ALLOW_TARGETS, ",".join(filter(None, names)))
        yield
