"""The jobs of a study, which is a sweep with ``hydra/sweeper=study``. Its jobs are called trials.

``settings`` is the node ``hydra`` of a job's config in each function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins

from speechtrain.run_directory import RunResult
from speechtrain.study import require_optuna


def register_study(overrides: Sequence[str]) -> None:
    """Register the sweeper of studies with Hydra if ``overrides`` choose it.

    Hydra's own search for plugins does not find it in an editable installation.
    """
    if "hydra/sweeper=study" not in overrides:
        return
    require_optuna()
    from hydra_plugins.speechtrain_study import StudySweeper

    Plugins.instance().register(StudySweeper)


def is_study(settings: Any) -> bool:
    """Return whether the job belongs to a study."""
    return "trial" in settings.sweeper


def trial_of(settings: Any) -> int | None:
    """Return the number of the trial, counted from 0, or None for a job outside a study."""
    number: int | None = settings.sweeper.get("trial")
    return number


def job_name(settings: Any) -> str:
    """Return the name of a sweep's job for messages: ``trial N``, or ``job N`` counted from 1."""
    trial = trial_of(settings)
    if trial is None:
        return f"job {settings.job.num + 1}"
    return f"trial {trial}"


def run_job(start: Callable[[], RunResult], settings: Any) -> RunResult:
    """Call ``start``, which runs a job, and return its result. Raises the error of the job."""
    if trial_of(settings) is None:
        return start()
    from speechtrain.study.trial_job import run_trial

    folder = Path(settings.sweep.dir).resolve()
    run_dir = Path(settings.runtime.output_dir).resolve()
    return run_trial(start, folder, run_dir, settings.sweeper)
