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
    swept_volatile,
)
from speechtrain.errors import RunError
from speechtrain.run_directory import ABOUT, CONFIG, About, read_about
from speechtrain.runs.user_yaml import text_of, user_yaml_files


class RunNames:
    """The names of the runs of one command.

    ``config_dir`` is the user's own config folder. The run.json of each run below OUTPUT_DIR is read at most
    once, so a command does not see runs that others start meanwhile.
    """

    def __init__(self, config_dir: str | None) -> None:
        self._config_dir = config_dir
        self._runs: list[tuple[Path, About]] | None = None

    def name(self, choices: Mapping[str, Any], overrides: Sequence[str], swept: Collection[str] = ()) -> str:
        """Return the name of the run with these overrides, whether it exists or not.

        ``choices`` are the choices of Hydra's groups. Raises RunError if several runs have these overrides.
        """
        run_dir = self.existing_run(overrides, swept)
        if run_dir is not None:
            return run_dir.name
        digest = fingerprint(overrides, user_yaml_files(choices, self._config_dir), swept)
        # A group may be absent here, because check() refuses ~GROUP only later.
        return f"{choices.get('model')}-{choices.get('data')}-{digest}"

    def existing_run(self, overrides: Sequence[str], swept: Collection[str] = ()) -> Path | None:
        """Return the run below OUTPUT_DIR with these overrides and the same YAML files of the user.

        A key that may change counts only in ``swept``, the keys that the command's sweep varies. A run of
        another sweep has other such keys and does not match. Raises RunError if several runs match.
        """
        volatile = swept_volatile(swept)
        run_dirs: list[Path] = []
        named_dirs: list[Path] = []
        for run_dir, about in self._started_runs():
            if about.argv is None or about.swept != volatile:
                continue  # A damaged run.json has no command line and matches no command.
            first_folder, current_folder = folders_of(about)
            fields = identifying_overrides(overrides, swept, current_folder)
            if identifying_overrides(about.overrides, volatile, first_folder) != fields:
                continue
            if not self._has_same_files(about) or not (run_dir / CONFIG).is_file():
                continue
            if "run_dir" in map(key_of_override, about.overrides):
                named_dirs.append(run_dir)
            else:
                run_dirs.append(run_dir)
        run_dirs = run_dirs or named_dirs  # A run that was started without run_dir comes first.
        if len(run_dirs) > 1:
            raise RunError(
                f"{run_dirs[0]} and {run_dirs[1]} started with the same keys. Choose one with run_dir=DIR"
            )
        return run_dirs[0] if run_dirs else None

    def _started_runs(self) -> list[tuple[Path, About]]:
        if self._runs is None:
            self._runs = []
            for path in sorted(base_folder().glob(f"*/{ABOUT}")):
                self._runs.append((path.parent, read_about(path.parent)))
        return self._runs

    def _has_same_files(self, about: About) -> bool:
        """Return whether the user's YAML files have the texts that they had at the run's start."""
        return all(text_of(self._config_dir, name) == text for name, text in about.written.items())


def folders_of(about: About) -> tuple[str, str]:
    """Return the folders of the relative paths in the overrides of a run, and of this command.

    Both are empty for a run whose folder is unknown or gone. Then texts are compared as they are.
    """
    if about.folder and Path(about.folder).is_dir():
        return about.folder, os.getcwd()
    return "", ""


def base_folder() -> Path:
    """Return the folder of runs without ``run_dir``."""
    return Path(os.environ.get("OUTPUT_DIR", "runs"))
