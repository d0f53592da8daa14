"""A study as a sweep: it asks for trials and gives them to a launcher of Hydra until it is full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf
from optuna.trial import FrozenTrial, TrialState

from speechtrain.compute_policy import usable_cpus
from speechtrain.config.resume_fields import key_of
from speechtrain.errors import ConfigError, RunError
from speechtrain.study.objectives import read_objectives
from speechtrain.study.output import write_page, write_recipe
from speechtrain.study.space import override_texts, split_overrides
from speechtrain.study.store import Study, StudySpec, outcome_of
from speechtrain.study.trial_job import UNMEASURED, trial_settings

Launch = Callable[[Sequence[Sequence[str]], int], Sequence[JobReturn]]

_MOST_LAUNCHES = 20
"""Starts of one trial by one command. A trial that is preempted, or tried again, starts several times."""

_FIRST_TRIALS = 3
"""Trials at the start of a study. If all are refused, the cause is not a key that the study searches."""


def run_study(config: DictConfig, parser: OverridesParser, arguments: Sequence[str], launch: Launch) -> None:
    """Run the trials of the study that ``config.hydra.sweeper`` and the overrides ``arguments`` define.

    The study in the sweep's folder continues if it exists. Raises ConfigError.
    """
    settings = config.hydra.sweeper
    fixed, space = split_overrides(parser.parse_overrides(list(arguments)))
    if any(key_of(text) == "dry_run" for text in fixed):
        raise ConfigError("dry_run: a study trains its trials; try one value without -m")
    spec = StudySpec(
        space=space,
        objectives=read_objectives(_plain(settings.objectives)),
        n_trials=int(settings.n_trials),
        sampler=settings.sampler,
        seed=int(settings.seed),
        first=tuple(_plain(settings.first)),
        fixed=tuple(fixed),
    )
    groups = {group.partition("@")[0] for group in config.hydra.runtime.choices}
    trial_settings({**settings, "trial": 0, "cores": 1})  # Wrong keys are refused before the first trial.
    parallel = _parallel(config)
    cores = settings.cores or max(1, len(usable_cpus()) // parallel)
    study = Study(Path(config.hydra.sweep.dir).resolve(), spec)
    launches: Counter[int] = Counter()
    while trials := study.claim(parallel):
        batch = [_overrides(trial, spec, cores, study.folder) for trial in trials]
        launch(batch, trials[0].number)
        for trial in trials:
            study.release(trial.number)
            launches[trial.number] += 1
            if launches[trial.number] > _MOST_LAUNCHES:
                raise RunError(f"trial {trial.number} was started {_MOST_LAUNCHES} times and did not end")
        write_recipe(study, groups)
        _require_a_success(study)
    write_page(study)


def _plain(node: Any) -> list[Any]:
    content: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    return content if isinstance(content, list) else [content]


def _parallel(config: DictConfig) -> int:
    """Return the number of trials at once: ``parallel``, or the number of jobs of Hydra's launcher."""
    parallel = config.hydra.sweeper.parallel
    if parallel is None:
        parallel = config.hydra.launcher.get("n_jobs", 1)
    if parallel == -1:  # joblib's word for one job for each core
        return len(usable_cpus())
    return max(1, int(parallel))


def _overrides(trial: FrozenTrial, spec: StudySpec, cores: int, folder: Path) -> list[str]:
    settings = [f"hydra.sweeper.trial={trial.number}", f"hydra.sweeper.cores={cores}"]
    settings.append(f"hydra.sweep.dir='{folder}'")  # Its default follows from the overrides of the command.
    return [*(spec.fixed or ()), *override_texts(trial.params), *settings]


def _require_a_success(study: Study) -> None:
    """Raise the first error if the first trials were all refused, because another key is wrong then."""
    finished = [trial for trial in study.trials() if trial.state.is_finished()]
    outcomes = [outcome_of(trial) for trial in finished]
    for outcome in outcomes:
        if outcome.status == UNMEASURED:
            raise ConfigError(outcome.error)
    is_success = any(trial.state == TrialState.COMPLETE for trial in finished)
    if not is_success and [outcome.status for outcome in outcomes] == ["refused"] * _FIRST_TRIALS:
        raise ConfigError(f"the first {_FIRST_TRIALS} trials were refused: {outcomes[0].error}")
