"""The objectives of a study: numbers of ``result.json`` to minimise or to maximise, with thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from speechtrain.errors import ConfigError
from speechtrain.run_directory import RunResult


@dataclass(frozen=True)
class Objective:
    """A number that a study minimises or maximises.

    Values beyond the threshold (above it for ``minimize``, below it for ``maximize``) are marked in the
    table, and such a trial is the best only if all trials are beyond a threshold.
    """

    name: str
    direction: Literal["minimize", "maximize"] = "minimize"
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.direction not in ("minimize", "maximize"):
            raise ConfigError(
                f"objective {self.name}: direction is minimize or maximize, not {self.direction}"
            )

    def excess(self, value: float) -> float:
        """Return by how much ``value`` is beyond the threshold, 0 or less if it is not beyond."""
        if self.threshold is None:
            return 0.0
        difference = value - self.threshold
        return difference if self.direction == "minimize" else -difference

    def worst(self, values: Sequence[float]) -> float:
        """Return the worst of ``values``."""
        return max(values) if self.direction == "minimize" else min(values)


def read_objectives(nodes: Sequence[Any]) -> list[Objective]:
    """Return objectives from names, and from mappings with the keys ``name``, ``direction``, ``threshold``.

    Raises ConfigError for other keys or values.
    """
    objectives = []
    for node in nodes:
        try:
            objectives.append(Objective(node) if isinstance(node, str) else Objective(**node))
        except TypeError:
            raise ConfigError(f"objective {node}: its keys are name, direction and threshold") from None
    if not objectives:
        raise ConfigError("a study needs an objective, as hydra.sweeper.objectives=[wer]")
    return objectives


def numbers_of(result: RunResult) -> dict[str, float]:
    """Return the numbers in ``result.json`` by name: metrics, speed, memory, seconds, updates."""
    numbers: dict[str, float | None] = {
        **(result.metrics or {}),
        **(result.speed or {}),
        "metric": result.metric,
        "wall_s": result.wall_s,
        "memory_mib": result.memory_mib,
        "steps": result.steps,
        "skipped_updates": result.skipped_updates,
    }
    return {name: float(number) for name, number in numbers.items() if number is not None}


def check_direction(objectives: Sequence[Objective], result: RunResult) -> None:
    """Raise ConfigError if the objective ``metric`` is minimised, although a higher value is better."""
    for objective in objectives:
        if objective.name == "metric" and result.metric_mode == "max" and objective.direction == "minimize":
            raise ConfigError("objective metric: a higher value is better. Set direction: maximize")


def values_of(objectives: Sequence[Objective], numbers: Mapping[str, float]) -> list[float]:
    """Return the value of each objective, in their order. Raises ConfigError if ``numbers`` lacks one."""
    for objective in objectives:
        if objective.name not in numbers:
            names = ", ".join(sorted(numbers))
            raise ConfigError(f"objective {objective.name}: the result of the run has {names or 'no number'}")
    return [numbers[objective.name] for objective in objectives]
