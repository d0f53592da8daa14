"""A study as a sweep: claim trials, run them by Hydra's launcher, and store their ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf
from optuna.trial import FrozenTrial, TrialState

from speechtrain.compute_policy import usable_cpus
from speechtrain.errors import ConfigError, DataError, Diverged, Preempted, RunError, SpeechtrainError
from speechtrain.files import print_line
from speechtrain.overrides import key_of_override
from speechtrain.run_directory import RunResult, read_failure
from speechtrain.study import trial_folder
from speechtrain.study.objectives import check_direction, numbers_of, read_objectives, values_of
from speechtrain.study.output import best_command, table, write_page
from speechtrain.study.space import first_assignments, override_texts, split_overrides
from speechtrain.study.store import Study, StudySpec, TrialResult, result_of
from speechtrain.study.trial_job import PRUNED

Launch = Callable[[Sequence[Sequence[str]], int], Sequence[JobReturn]]
"""A function that runs trials and returns their ends: a RunResult, or a SpeechtrainError.

Its arguments are the overrides of each trial, and the number of the first trial.
"""

_HANDLING_BY_STATUS = ("failed", "refused", "diverged", "out_of_memory")
"""The keys of ``hydra.sweeper`` that say what happens after a failure: the trial runs again (retry), has no
values (prune), or gets the worst values so far (worst)."""

_FIRST_TRIALS = 3
"""If the first trials, at least this number, are all refused, the cause is not in a searched key."""


def run_study(config: DictConfig, parser: OverridesParser, arguments: Sequence[str], launch: Launch) -> None:
    """Run the trials of the study that ``config.hydra.sweeper`` and the overrides ``arguments`` define.

    If the sweep's folder already has this study, continue it. A dry run only prints what the study searches.
    Raises ConfigError for a wrong definition, and RunError if no trial is complete.
    """
    settings: Any = OmegaConf.to_container(config.hydra.sweeper, resolve=True)
    fixed, space = split_overrides(parser.parse_overrides(list(arguments)))
    spec = StudySpec(
        space=space,
        objectives=read_objectives(settings["objectives"]),
        n_trials=int(settings["n_trials"]),
        sampler=settings["sampler"],
        seed=int(settings["seed"]),
        first=first_assignments(space, settings["first"], parser),
        fixed=fixed,
    )
    _check_settings(settings, spec)
    folder = Path(config.hydra.sweep.dir).resolve()
    if config.dry_run:
        print_line(f"study {folder}: {spec.n_trials} trials, sampler={spec.sampler}, it searches")
        for text in arguments:
            if key_of_override(text) in spec.space:
                print_line(text)
        return
    study = Study(folder, spec)
    parallel = settings["parallel"]  # the number of trials that run at the same time
    if parallel is None:
        parallel = config.hydra.launcher.get("n_jobs", 1)
    if parallel == -1:  # In joblib, -1 means one job for each core.
        parallel = len(usable_cpus())
    parallel = max(1, int(parallel))
    cores = settings["cores"] or max(1, len(usable_cpus()) // parallel)
    failures: Counter[int] = Counter()  # by the number of the trial
    while trials := _claim(study, parallel):
        jobs = []
        for trial in trials:
            job = [*fixed, *override_texts(trial.params)]
            job += [f"hydra.sweeper.trial={trial.number}", f"hydra.sweeper.cores={cores}"]
            # The default folder depends on the overrides, which differ for each trial. All need this folder.
            job.append(f"hydra.sweep.dir='{folder}'")
            jobs.append(job)
        ends = launch(jobs, trials[0].number)
        for trial, end in zip(trials, ends, strict=True):
            _store_end(study, trial.number, end.return_value, settings, failures)
            study.release(trial.number)
        results = [result_of(trial) for trial in study.trials() if trial.state.is_finished()]
        are_all_refused = all(result.status == "refused" for result in results)
        if len(results) >= _FIRST_TRIALS and are_all_refused:
            raise ConfigError(f"the first {len(results)} trials were refused: {results[0].error}")
    write_page(study)
    for line in table(study):
        print_line(line)
    command = best_command(study)
    if not command:
        raise RunError(f"no trial of the study in {folder} is complete")
    print_line(f"train with: {command}")


def _check_settings(settings: Mapping[str, Any], spec: StudySpec) -> None:
    """Raise ConfigError for a wrong key of ``hydra.sweeper``, before the first trial starts."""
    for key in _HANDLING_BY_STATUS:
        if settings[key] not in ("retry", "prune", "worst"):
            raise ConfigError(f"hydra.sweeper.{key} is {settings[key]}: it is retry, prune or worst")
    if settings["pruner"] not in (None, "median"):
        raise ConfigError(f"hydra.sweeper.pruner is {settings['pruner']}: it is median or null")
    # The pruner compares one metric of the validations by its name. The objective "metric" is the metric that
    # chose the best checkpoint, whatever its name is.
    has_no_metric_name = spec.objectives[0].name == "metric"
    if settings["pruner"] and (len(spec.objectives) > 1 or has_no_metric_name):
        raise ConfigError("hydra.sweeper.pruner=median needs one objective by its name, as objectives=[wer]")


def _claim(study: Study, count: int) -> list[FrozenTrial]:
    """Return up to ``count`` trials that this process has now claimed."""
    trials: list[FrozenTrial] = []
    while len(trials) < count and (trial := study.claim()):
        trials.append(trial)
    return trials


def _store_end(
    study: Study,
    number: int,
    end: RunResult | SpeechtrainError,
    settings: Mapping[str, Any],
    failures: Counter[int],
) -> None:
    """Store the result of a trial, unless it was interrupted or will run again.

    ``failures`` has the number of failures of each trial. Raises ConfigError if a result lacks an objective.
    """
    if isinstance(end, Preempted):
        return
    if isinstance(end, RunResult):
        if end.status == PRUNED:
            study.finish(number, TrialResult(PRUNED), state=TrialState.PRUNED)
            return
        check_direction(study.spec.objectives, end)
        values = values_of(study.spec.objectives, numbers_of(end))
        if all(map(math.isfinite, values)):
            study.finish(number, TrialResult(end.status), values)
            return
        end = Diverged("the objective is not finite")
    status = _failure_status(end, study.folder / trial_folder(number))
    handling = settings[status]
    failures[number] += 1
    if handling == "retry" and failures[number] <= settings["retries"]:
        print_line(f"trial {number} {status} and is tried again")
        return
    worst_values = study.worst_values() if handling == "worst" else None
    # ``finish`` uses the state only without values. A trial with values is complete.
    state = TrialState.FAIL if handling == "retry" else TrialState.PRUNED
    study.finish(number, TrialResult(status, str(end)), worst_values, state)


def _failure_status(error: SpeechtrainError, run_dir: Path) -> str:
    """Return the kind of a failure, which is also the key of ``hydra.sweeper`` for its handling."""
    failure = read_failure(run_dir)
    if failure is not None and failure.is_out_of_memory:
        return "out_of_memory"
    if isinstance(error, Diverged):
        return "diverged"
    if isinstance(error, ConfigError | DataError):
        return "refused"
    return "failed"
