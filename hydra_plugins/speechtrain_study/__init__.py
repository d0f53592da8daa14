"""The sweeper ``hydra/sweeper=study``. Hydra accepts only sweepers in the namespace ``hydra_plugins``."""

from __future__ import annotations

from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class StudySweeper(Sweeper):
    """Runs the trials of a study by Hydra's launcher. ``conf/hydra/sweeper/study.yaml`` explains the keys."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.hydra_context = hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        from speechtrain.study.sweep import run_study

        assert self.config is not None
        assert self.hydra_context is not None
        assert self.launcher is not None
        launcher = self.launcher

        def launch(trial_overrides: Any, first_trial: int) -> Any:
            return launcher.launch(trial_overrides, initial_job_idx=first_trial)

        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        run_study(self.config, parser, arguments, launch)
