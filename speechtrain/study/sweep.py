"""A study as a sweep: it claims trials and gives them to a launcher of Hydra until the study is full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf
from optuna.trial import FrozenTrial

from speechtrain.compute_policy import usable_cpus
from speechtrain.config.resume_fields import key_of_override
from speechtrain.errors import ConfigError, RunError
from speechtrain.study.objectives import read_objectives
from speechtrain.study.output import write_page, write_recipe
from speechtrain.study.space import override_texts, split_overrides
from speechtrain.study.store import Study, StudySpec, outcome_of
from speechtrain.study.trial_job import UNMEASURED, trial_settings

Launch = Callable[[Sequence[Sequence[str]], int], Sequence[JobReturn]]
"""Runs trials, each with its overrides, and returns their results. The int is the first trial's number."""

_MOST_LAUNCHES = 20
"""The most starts of one trial by one command. A trial starts again if it was preempted, or for a retry."""

_FIRST_TRIALS = 3
"""If this many first trials are all refused, the study ends: the cause is not a key that it searches."""


def run_study(config: DictConfig, parser: OverridesParser, arguments: Sequence[str], launch: Launch) -> None:
    """Run the trials of the study that ``config.hydra.sweeper`` and the overrides ``arguments`` define.

    The study in the sweep's folder continues if it exists. Raises ConfigError, and RunError for a trial that
    starts again and again.
    """
    settings: Any = OmegaConf.to_container(config.hydra.sweeper, resolve=True)
    spec = _spec(settings, parser, arguments)
    _check_settings(settings, spec)
    study = Study(Path(config.hydra.sweep.dir).resolve(), spec)
    parallel = _parallel(config)
    cores = settings["cores"] or max(1, len(usable_cpus()) // parallel)
    groups = {group.partition("@")[0] for group in config.hydra.runtime.choices}
    launches: Counter[int] = Counter()
    while trials := study.claim(parallel):
        launch([_overrides(study, trial, cores) for trial in trials], trials[0].number)
        for trial in trials:
            study.release(trial.number)
            launches[trial.number] += 1
            if launches[trial.number] > _MOST_LAUNCHES:
                raise RunError(f"trial {trial.number} was started {_MOST_LAUNCHES} times and did not end")
        write_recipe(study, groups)
        _check_outcomes(study)
    write_page(study)


def _spec(settings: dict[str, Any], parser: OverridesParser, arguments: Sequence[str]) -> StudySpec:
    fixed, space = split_overrides(parser.parse_overrides(list(arguments)))
    if any(key_of_override(text) == "dry_run" for text in fixed):
        raise ConfigError("dry_run: a study trains its trials. Try one value without -m")
    return StudySpec(
        space=space,
        objectives=read_objectives(settings["objectives"]),
        n_trials=int(settings["n_trials"]),
        sampler=settings["sampler"],
        seed=int(settings["seed"]),
        first=tuple(settings["first"]),
        fixed=tuple(fixed),
    )


def _check_settings(settings: dict[str, Any], spec: StudySpec) -> None:
    """Raise ConfigError for a wrong key before the first trial."""
    # The result is not needed here. The call raises the errors that every trial would raise.
    trial_settings({**settings, "trial": 0, "cores": 1})
    # The pruner follows one metric of the validations. "metric" names another number: the one that chose the
    # best checkpoint.
    lacks_name = spec.objectives[0].name == "metric"
    if settings["pruner"] and (len(spec.objectives) > 1 or lacks_name):
        raise ConfigError("hydra.sweeper.pruner=median needs one objective by its name, as objectives=[wer]")


def _parallel(config: DictConfig) -> int:
    """Return the number of trials at once: ``parallel``, or the number of jobs of Hydra's launcher."""
    parallel = config.hydra.sweeper.parallel
    if parallel is None:
        parallel = config.hydra.launcher.get("n_jobs", 1)
    if parallel == -1:  # joblib's word for one job for each core
        return len(usable_cpus())
    return max(1, int(parallel))


def _overrides(study: Study, trial: FrozenTrial, cores: int) -> list[str]:
    settings = [f"hydra.sweeper.trial={trial.number}", f"hydra.sweeper.cores={cores}"]
    # The default folder depends on the overrides, which differ for each trial. All trials need this folder.
    settings.append(f"hydra.sweep.dir='{study.folder}'")
    return [*(study.spec.fixed or ()), *override_texts(trial.params), *settings]


def _check_outcomes(study: Study) -> None:
    """Raise ConfigError if a result lacks an objective, or if the first trials were all refused."""
    outcomes = [outcome_of(trial) for trial in study.trials() if trial.state.is_finished()]
    for outcome in outcomes:
        if outcome.status == UNMEASURED:
            raise ConfigError(outcome.error)
    are_all_refused = all(outcome.status == "refused" for outcome in outcomes)
    if len(outcomes) >= _FIRST_TRIALS and are_all_refused:
        raise ConfigError(f"the first {len(outcomes)} trials were refused: {outcomes[0].error}")
