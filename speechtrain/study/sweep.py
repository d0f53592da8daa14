"""A study as a sweep: claim trials and run them by Hydra's launcher, until the study is full."""

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
from speechtrain.files import print_line
from speechtrain.study.objectives import read_objectives
from speechtrain.study.output import write_page, write_recipe
from speechtrain.study.space import first_assignments, override_texts, split_overrides
from speechtrain.study.store import Study, StudySpec, outcome_of
from speechtrain.study.trial_job import UNMEASURED, trial_settings

Launch = Callable[[Sequence[Sequence[str]], int], Sequence[JobReturn]]
"""A function that runs trials and returns their results.

Its arguments are the overrides of each trial, and the number of the first trial.
"""

_MAX_STARTS = 20
"""The maximum of starts of a trial by one command. A trial starts again after a preemption or for a retry."""

_FIRST_TRIALS = 3
"""If the first trials, at least this number, are all refused, the cause is not in a searched key."""


def run_study(config: DictConfig, parser: OverridesParser, arguments: Sequence[str], launch: Launch) -> None:
    """Run the trials of the study that ``config.hydra.sweeper`` and the overrides ``arguments`` define.

    If the sweep's folder already has this study, continue it. A dry run only prints what the study searches.
    Raises ConfigError for a wrong definition, and RunError for a trial that is started too often.
    """
    settings: Any = OmegaConf.to_container(config.hydra.sweeper, resolve=True)
    spec = _spec(settings, parser, arguments)
    _check_settings(settings, spec)
    if config.dry_run:
        folder = Path(config.hydra.sweep.dir).resolve()
        print_line(f"study {folder}: {spec.n_trials} trials, sampler={spec.sampler}, it searches")
        for text in arguments:
            if key_of_override(text) in spec.space:
                print_line(text)
        return
    study = Study(Path(config.hydra.sweep.dir).resolve(), spec)
    parallel = _parallel(config)
    cores = settings["cores"] or max(1, len(usable_cpus()) // parallel)
    groups = {group.partition("@")[0] for group in config.hydra.runtime.choices}  # "group@package"
    starts: Counter[int] = Counter()  # by the number of the trial
    trials = study.claim(parallel)
    while trials:
        launch([_overrides(study, trial, cores) for trial in trials], trials[0].number)
        for trial in trials:
            study.release(trial.number)
            starts[trial.number] += 1
            if starts[trial.number] > _MAX_STARTS:
                raise RunError(f"trial {trial.number} was started {_MAX_STARTS} times and did not end")
        write_recipe(study, groups)
        _check_outcomes(study)
        trials = study.claim(parallel)
    write_page(study)


def _spec(settings: dict[str, Any], parser: OverridesParser, arguments: Sequence[str]) -> StudySpec:
    """Return the definition of the study. Raises ConfigError if it is wrong."""
    fixed, space = split_overrides(parser.parse_overrides(list(arguments)))
    return StudySpec(
        space=space,
        objectives=read_objectives(settings["objectives"]),
        n_trials=int(settings["n_trials"]),
        sampler=settings["sampler"],
        seed=int(settings["seed"]),
        first=first_assignments(space, settings["first"], parser),
        fixed=tuple(fixed),
    )


def _check_settings(settings: dict[str, Any], spec: StudySpec) -> None:
    """Raise ConfigError for a wrong key of ``hydra.sweeper``, before the first trial starts."""
    # The call raises the errors that every trial would raise. Its result is not needed.
    trial_settings({**settings, "trial": 0, "cores": 1})
    # The pruner compares one metric of the validations by its name. The objective "metric" is the metric that
    # chose the best checkpoint, whatever its name is.
    has_no_metric_name = spec.objectives[0].name == "metric"
    if settings["pruner"] and (len(spec.objectives) > 1 or has_no_metric_name):
        raise ConfigError("hydra.sweeper.pruner=median needs one objective by its name, as objectives=[wer]")


def _parallel(config: DictConfig) -> int:
    """Return the number of trials that run at the same time.

    It is the key ``hydra.sweeper.parallel``, or else the number of jobs of Hydra's launcher.
    """
    parallel = config.hydra.sweeper.parallel
    if parallel is None:
        parallel = config.hydra.launcher.get("n_jobs", 1)
    if parallel == -1:  # In joblib, -1 means one job for each core.
        return len(usable_cpus())
    return max(1, int(parallel))


def _overrides(study: Study, trial: FrozenTrial, cores: int) -> list[str]:
    """Return the overrides of a trial's job."""
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
