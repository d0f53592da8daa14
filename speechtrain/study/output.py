"""The results of a study: a table, the command of the best trial, and optuna's plots in one HTML file."""

from __future__ import annotations

import html
import shlex
from collections.abc import Iterator
from typing import Any

from optuna.trial import FrozenTrial

from speechtrain.files import table_lines, write_text
from speechtrain.study.space import override_texts
from speechtrain.study.store import Study, result_of

PAGE = "study.html"


def table(study: Study) -> list[str]:
    """Return a line for each trial: status, objectives, assignments, error."""
    best = study.best()
    names = [objective.name for objective in study.spec.objectives]
    rows = [["trial", "status", *names, "assignments"]]
    for trial in study.trials():
        result = result_of(trial)
        status = result.status
        beyond_threshold = [name for name, excess in trial.constraints.items() if excess > 0]
        if beyond_threshold:
            status += f", beyond {', '.join(beyond_threshold)}"
        values = ["-"] * len(names)
        if trial.values:
            values = [f"{value:.5g}" for value in trial.values]
        assignments = []
        for key, value in trial.params.items():
            if isinstance(value, float):
                value = f"{value:.5g}"
            assignments.append(f"{key}={value}")
        last_column = " ".join([*assignments, result.error]).rstrip()
        if best is not None and trial.number == best.number:
            last_column += "  (best)"
        rows.append([str(trial.number), status, *values, last_column])
    return table_lines(rows)


def best_command(study: Study) -> str:
    """Return the command that trains with the values of the best trial, or an empty text without one."""
    best = study.best()
    if best is None:
        return ""
    fixed = [text for text in study.spec.fixed if not text.startswith("run_dir=")]
    return shlex.join(["speechtrain", "train", *fixed, *override_texts(best.params)])


def write_page(study: Study) -> None:
    """Write the table and optuna's plots of the study as one HTML file that needs no network."""
    if len(study.complete_trials()) < 2:  # The plots need two complete trials.
        return
    title = html.escape(study.folder.name)
    rows = html.escape("\n".join(table(study)))
    body = f"<h1>{title}</h1><pre>{rows}</pre>"
    for number, figure in enumerate(_figures(study)):
        # The first plot contains the library of all plots.
        body += figure.to_html(full_html=False, include_plotlyjs=number == 0)
    write_text(study.folder / PAGE, f"<!doctype html><meta charset=utf-8><title>{title}</title>{body}")


def _figures(study: Study) -> Iterator[Any]:
    """Yield optuna's plots of the study."""
    from optuna import visualization

    for index, objective in enumerate(study.spec.objectives):

        def target(trial: FrozenTrial, index: int = index) -> float:
            return float(trial.values[index])

        options: dict[str, Any] = {"target": target, "target_name": objective.name}
        yield visualization.plot_optimization_history(study.optuna, **options)
        yield visualization.plot_slice(study.optuna, **options)
    if len(study.spec.objectives) > 1:
        yield visualization.plot_pareto_front(study.optuna)
    yield visualization.plot_timeline(study.optuna)
