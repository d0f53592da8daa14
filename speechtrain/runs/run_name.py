"""The name of a command's run: the name of the run that the same command has started, or a new name."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from speechtrain.config.resume_fields import (
    fingerprint,
    identifying_overrides,
    key_of_override,
    volatile_keys_of_sweep,
)
from speechtrain.errors import RunError
from speechtrain.run_directory import ABOUT, CONFIG, About, read_about
from speechtrain.runs.user_yaml import text_of, user_yaml_files


class RunNames:
    """Finds or makes the names of the runs of one command.

    ``config_dir`` is the user's config folder. The run.json of each run below OUTPUT_DIR is read at most
    once, so runs that other commands start later are not seen.
    """

    def __init__(self, config_dir: str | None) -> None:
        self._config_dir = config_dir
        self._runs: list[tuple[Path, About]] | None = None

    def name(self, choices: Mapping[str, Any], overrides: Sequence[str], swept: Collection[str] = ()) -> str:
        """Return the name of the existing run with these overrides, or the name of a new run.

        ``choices`` has the choice of each group of Hydra, and ``swept`` the keys that the command's sweep
        varies. Raises RunError if several runs have these overrides.
        """
        run_dir = self.existing_run(overrides, swept)
        if run_dir is not None:
            return run_dir.name
        digest = fingerprint(overrides, user_yaml_files(choices, self._config_dir), swept)
        # A group may be absent here, because check() refuses ~GROUP only later.
        return f"{choices.get('model')}-{choices.get('data')}-{digest}"

    def existing_run(self, overrides: Sequence[str], swept: Collection[str] = ()) -> Path | None:
        """Return the run below OUTPUT_DIR that these overrides have started, or None.

        The run must have the same identifying overrides and the same YAML files of the user. Volatile keys,
        which may change during a run, identify a run only if its sweep varied them (``swept``).

        Raises RunError if several runs match. Runs without an explicit ``run_dir`` are preferred.
        """
        swept_keys = volatile_keys_of_sweep(swept)
        unnamed_dirs: list[Path] = []  # matching runs that were started without run_dir=
        named_dirs: list[Path] = []
        for run_dir, about in self._started_runs():
            if about.argv is None or volatile_keys_of_sweep(about.swept) != swept_keys:
                continue  # run.json is damaged, or the run belongs to another sweep.
            first_folder, current_folder = folders_of(about)
            command_overrides = identifying_overrides(overrides, swept, current_folder)
            if identifying_overrides(about.overrides, swept_keys, first_folder) != command_overrides:
                continue
            if not self._has_same_files(about) or not (run_dir / CONFIG).is_file():
                continue
            if "run_dir" in map(key_of_override, about.overrides):
                named_dirs.append(run_dir)
            else:
                unnamed_dirs.append(run_dir)
        run_dirs = unnamed_dirs or named_dirs
        if len(run_dirs) > 1:
            raise RunError(
                f"{run_dirs[0]} and {run_dirs[1]} started with the same keys. Choose one with run_dir=DIR"
            )
        return run_dirs[0] if run_dirs else None

    def _started_runs(self) -> list[tuple[Path, About]]:
        """Return the directory and the run.json of each run below OUTPUT_DIR."""
        if self._runs is None:
            self._runs = []
            for path in sorted(base_folder().glob(f"*/{ABOUT}")):
                self._runs.append((path.parent, read_about(path.parent)))
        return self._runs

    def _has_same_files(self, about: About) -> bool:
        """Return whether the user's YAML files have the texts that they had at the run's start."""
        return all(text_of(self._config_dir, name) == text for name, text in about.written.items())


def folders_of(about: About) -> tuple[str, str]:
    """Return the working folder of a run's first start, and the one of this command.

    Relative paths in overrides are relative to these folders. If the first folder is unknown or was removed,
    both are empty, and paths are compared as they are written.
    """
    if about.folder and Path(about.folder).is_dir():
        return about.folder, os.getcwd()
    return "", ""


def base_folder() -> Path:
    """Return the folder of runs without ``run_dir``."""
    return Path(os.environ.get("OUTPUT_DIR", "runs"))
