"""One job of ``speechtrain train``: its config, and the start of its run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from speechtrain.errors import ConfigError, DataError, MissingPackage, print_notice
from speechtrain.overrides import key_of_override
from speechtrain.run_directory import CONFIG, RunResult
from speechtrain.start.auto_device import announce_auto, check_launcher
from speechtrain.start.check_keys import check
from speechtrain.start.choices import option_value
from speechtrain.start.command_line import Command, translate_arguments
from speechtrain.start.compose import Composed, compose, compose_with_choices
from speechtrain.start.from_data import explicit_keys, follow_data
from speechtrain.start.on_host import raise_or_warn
from speechtrain.start.recipe_needs import needs_of, settle_needs
from speechtrain.start.resolved import with_absolute_paths
from speechtrain.start.resume import config_to_continue, continue_own_run, drop_recipe_hours, run_to_continue
from speechtrain.start.run_name import base_folder, run_name
from speechtrain.start.start import start_run
from speechtrain.start.untranscribed import add_texts
from speechtrain.start.user_yaml import user_yaml_files


def start_job(job: Command, run_dir: Path | None = None) -> RunResult:
    """Start or continue the run of a job, and return its result.

    ``run_dir`` is the run directory that a sweep has chosen for its job. By default the command names it, or
    it follows from the command. A run that exists there continues. Raises the SpeechtrainError that stopped
    the run.
    """
    named_run_dir = run_to_continue(job)
    if named_run_dir is not None:
        return start_run(job, config_to_continue(named_run_dir, job), {})
    composed = compose_with_choices(job.overrides, job.config_dir)
    config = composed.config
    if run_dir is None:
        name = run_name(composed.choices, job.overrides, job.config_dir)
        run_dir = Path(config.run_dir or base_folder() / name)
    run_dir = run_dir.resolve()  # Ranks on other hosts and a resumed command must use the same folder.
    user_files = user_yaml_files(composed.choices, job.config_dir)
    folders = NewFolders()
    folders.note_missing(str(run_dir))
    try:
        if not (run_dir / CONFIG).is_file():
            config = _new_config(job, composed, run_dir, user_files)
        elif config.run_dir is None:  # The run was found by its name, not named by the user.
            config = continue_own_run(run_dir, job, config)
        else:
            config = config_to_continue(run_dir, job)
        return start_run(job, config, user_files)
    finally:
        folders.remove_empty()


def _new_config(job: Command, composed: Composed, run_dir: Path, user_files: Mapping[str, str]) -> DictConfig:
    """Return the config of a new run in ``run_dir``, with the keys that its data decides.

    ``user_files`` holds the texts of the user's own YAML files by ``group/choice``.
    """
    config = composed.config
    announce_auto(composed.choices, config, job.external_launch)
    config.run_dir = str(run_dir)
    _refuse_other_validation(job, config, str(composed.choices.get("data")))
    for notice in composed.notices:
        print_notice(notice)
    with_absolute_paths(config)
    if str(config.init_from).startswith("hf:"):
        from speechtrain.interop.hub import pinned

        try:
            config.init_from = pinned(config.init_from)
        except MissingPackage as error:
            raise_or_warn(str(error), is_warning=config.dry_run)
    keys = explicit_keys(job.overrides, user_files)
    if job.external_launch:  # Another program has started the ranks.
        keys.add("world_size")
        if config.world_size == 1:
            config.world_size = job.external_launch.world.size
    if settle_needs(config):  # A dry run with missing data only prints a plan.
        drop_recipe_hours(config, keys)
    else:
        if config.data.get("untranscribed"):
            keys |= add_texts(job, config, start_job)
        follow_data(config, keys)
    return config


def config_of_new_run(overrides: Sequence[str], config_dir: str | None, run_dir: str) -> Composed:
    """Return the config that a training with ``overrides`` would have, with its choices and notices.

    The training data is read if keys follow from it, and nothing is started. Raises DataError if parts are
    missing, and the SpeechtrainError of the first wrong key.
    """
    composed = compose_with_choices(translate_arguments(overrides), config_dir)
    config = composed.config
    check_launcher(composed.choices, config)
    config.run_dir = run_dir
    needs = needs_of(config)
    if needs:
        raise DataError(". ".join(map(str, needs)))
    check(config)
    follow_data(config, explicit_keys(overrides, {}))
    return composed


def _refuse_other_validation(job: Command, config: DictConfig, choice: str) -> None:
    """Raise ConfigError if the user's files replace only the training set of a corpus that is a class.

    Such a run would validate, and choose its best checkpoint, on recordings of the corpus. ``choice`` is the
    value of ``data=``.
    """
    is_train_explicit = "data.train" in map(key_of_override, job.overrides)
    if not is_train_explicit or isinstance(config.data.train, DictConfig):
        return
    data: Any = OmegaConf.to_container(compose([f"data={choice}"], job.config_dir).data)
    if isinstance(data.get("train"), dict):
        raise ConfigError(f"data.train: data={choice} validates on its own recordings. Add data=manifest")


def print_config(command: Command) -> None:
    """Print the config of a job as YAML. Hydra would print it with the values that a command replaces."""
    config, _, notices = compose_with_choices(command.overrides, command.config_dir)
    for notice in notices:
        print_notice(notice)
    if "--resolve" in command.flags:
        OmegaConf.resolve(config)
    package = option_value(command.flags, "--package", "-p")
    node: Any = OmegaConf.select(config, package) if package else config
    if not OmegaConf.is_config(node):
        raise ConfigError(f"--package {package}: the config has no such group")
    heading = f"# @package {package}\n" if package else ""
    print(heading + OmegaConf.to_yaml(node), end="")


class NewFolders:
    """The paths that did not exist before a start.

    When the command ends, its empty folders and Hydra's files are removed.
    """

    def __init__(self) -> None:
        self.missing: set[Path] = set()

    def note_missing(self, path: str) -> str:
        """Store ``path`` and its parents, as far as they do not exist yet, and return ``path``."""
        absolute_path = Path(path).absolute()
        for member in (absolute_path, *absolute_path.parents):
            if not member.exists():
                self.missing.add(member)
        return path

    def remove_empty(self) -> None:
        """Remove the files, and the folders that are empty, the deepest first."""
        for path in sorted(self.missing, key=lambda path: len(path.parts), reverse=True):
            with contextlib.suppress(OSError):  # The folder is not empty, or nobody has made it.
                if path.is_file():
                    path.unlink()
                else:
                    path.rmdir()
