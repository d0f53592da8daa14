"""The code outside speechtrain that a run executes: the modules of the classes that its config names."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from speechtrain.errors import RunError
from speechtrain.files import sha256
from speechtrain.run_directory import git_output, git_state
from speechtrain.start.changeable_keys import may_change
from speechtrain.start.schema import INTERFACES
from speechtrain.start.targets import target_class

_PARTS = "parts"
"""Folder of a run with a copy of each module."""
_MAX_COPY_BYTES = 2**20
_TARGET = re.compile(r"^[ -]*_target_: (\S+)$", re.MULTILINE)

Modules = Mapping[str, Mapping[str, Any]]


def own_code(config: DictConfig) -> dict[str, dict[str, Any]]:
    """Return the entries on each module by its name: the fields of ``About.parts``."""
    modules: dict[str, dict[str, Any]] = {}
    for group in INTERFACES:
        for target in _TARGET.findall(OmegaConf.to_yaml(config[group])):
            name = target_class(target, group).__module__
            package_name, _, _ = name.partition(".")
            package = sys.modules[package_name]
            file = getattr(sys.modules[name], "__file__", None)
            if package_name in ("speechtrain", "torch") or file is None or name in modules:
                continue
            path = Path(file)
            entries = {"group": group, "file": file, "sha256": sha256(path)}
            entries["version"] = str(getattr(package, "__version__", ""))
            entries["diff"] = git_output(path.parent, "diff", "HEAD", "--", path.name)[:_MAX_COPY_BYTES]
            modules[name] = entries | git_state(path)
    return modules


def refuse_changes(former_modules: Modules, modules: Modules, run_dir: Path) -> None:
    """Raise RunError for a module that has changed, unless its group may change when a run continues."""
    for name, entries in modules.items():
        former_digest = former_modules.get(name, {}).get("sha256", entries["sha256"])
        if entries["sha256"] != former_digest and not may_change(entries["group"]):
            cause = f"{entries['file']} has changed since {run_dir} started"
            raise RunError(f"{cause}. accept_code=true continues the run with the new code")


def copy_modules(modules: Modules, run_dir: Path) -> None:
    """Copy the modules of at most a MiB into the folder ``parts``. An earlier copy of other code stays."""
    for entries in modules.values():
        path = Path(entries["file"])
        if path.stat().st_size <= _MAX_COPY_BYTES:
            (run_dir / _PARTS).mkdir(exist_ok=True)
            shutil.copy(path, run_dir / _PARTS / f"{path.stem}-{entries['sha256'][:8]}{path.suffix}")
