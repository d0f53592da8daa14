"""The search space of a study: parameters and their distributions, in Hydra's sweep syntax."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState, create_trial

from speechtrain.errors import ConfigError

Space = Mapping[str, BaseDistribution]
"""The distribution of each parameter, by the name of its key."""


def split_overrides(overrides: Iterable[Override]) -> tuple[list[str], dict[str, BaseDistribution]]:
    """Return the fixed overrides as ``KEY=VALUE`` texts, and the search space of the other overrides.

    Raises ConfigError for a sweep that is not a distribution.
    """
    fixed = []
    space = {}
    for override in overrides:
        text = override.input_line or ""
        if not override.is_sweep_override():
            fixed.append(text)
            continue
        try:
            space[override.get_key_element()] = distribution(override)
        except ValueError as error:
            raise ConfigError(f"{text}: {error}") from None
    return fixed, space


def distribution(override: Override) -> BaseDistribution:
    """Return the distribution of a sweep: ``interval``, ``range`` (without its end), ``choice`` or a list.

    ``tag(log, …)`` makes an interval or a range of integers logarithmic. Raises ValueError for other sweeps.
    """
    sweep = override.value()
    tags = getattr(sweep, "tags", None)
    is_log = tags == {"log"}
    if tags and not is_log:
        raise ValueError("the only tag is log")
    if isinstance(sweep, IntervalSweep):
        low, high = sweep.start, sweep.end
        if low is None or high is None:
            raise ValueError("an interval needs both bounds, as interval(1e-3,1e-2)")
        if isinstance(low, int) and isinstance(high, int):
            return IntDistribution(low, high, log=is_log)
        return FloatDistribution(low, high, log=is_log)
    if isinstance(sweep, RangeSweep):
        return _range_distribution(sweep, is_log)
    if is_log:
        raise ValueError("tag(log, …) needs an interval or a range of numbers")
    if isinstance(sweep, ChoiceSweep) or override.is_discrete_sweep():
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    raise ValueError("a study searches intervals, ranges and choices")


def _range_distribution(sweep: RangeSweep, is_log: bool) -> BaseDistribution:
    """Return the distribution of a range, which excludes its end. optuna's distributions include it."""
    start, stop, step = sweep.start, sweep.stop, sweep.step
    if start is None or stop is None or not 0 < step <= stop - start:
        raise ValueError("a range needs a start below its end and a positive step, as range(20,200)")
    count = -int(-(stop - start) // step)  # the number of values: (stop - start) / step, rounded up
    high = start + (count - 1) * step
    if isinstance(start, int) and isinstance(step, int):
        return IntDistribution(start, int(high), step=step, log=is_log)
    if is_log:
        raise ValueError("tag(log, range(…)) needs integers; use tag(log, interval(…))")
    return FloatDistribution(start, high, step=step)


def grid(space: Space) -> list[dict[str, Any]]:
    """Return every combination of the values of ``space``. Raises ConfigError for a continuous parameter."""
    values = []
    for name, parameter in space.items():
        if isinstance(parameter, CategoricalDistribution):
            values.append(parameter.choices)
        elif isinstance(parameter, IntDistribution):
            values.append(tuple(range(parameter.low, parameter.high + 1, parameter.step)))
        elif isinstance(parameter, FloatDistribution) and parameter.step:
            low, step = parameter.low, parameter.step
            count = round((parameter.high - low) / step) + 1
            values.append(tuple([low + index * step for index in range(count)]))
        else:
            raise ConfigError(f"{name}: hydra.sweeper.sampler=grid needs a choice or a range of values")
    return [dict(zip(space, combination, strict=True)) for combination in itertools.product(*values)]


def first_assignments(space: Space, points: Any, parser: OverridesParser) -> list[dict[str, Any]]:
    """Return ``points``, the assignments of the first trials, with values of ``space``.

    A point may lack keys of the space. Raises ConfigError unless ``points`` is a list of mappings from keys
    of the space to their values.
    """
    first = []
    for point in points:
        try:
            assignments = {key: _element(key, space[key], value, parser) for key, value in point.items()}
            distributions = {key: space[key] for key in assignments}
            # The constructor checks the values.
            create_trial(state=TrialState.RUNNING, params=assignments, distributions=distributions)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            example = "a list such as [{optimizer.lr: 3e-3}], with keys and values of the search space"
            raise ConfigError(f"hydra.sweeper.first has {point}: it is {example} ({error})") from None
        first.append(assignments)
    return first


def _element(key: str, parameter: BaseDistribution, value: Any, parser: OverridesParser) -> Any:
    """Return the choice that means ``value``, or ``value`` itself.

    Choices are texts in Hydra's syntax, such as "8" and "true".
    """
    if isinstance(parameter, CategoricalDistribution):
        for text in parameter.choices:
            if value in (text, parser.parse_override(f"{key}={text}").value()):
                return text
    return value


def override_texts(assignments: Mapping[str, Any]) -> list[str]:
    """Return the assignments of a trial as overrides in Hydra's syntax."""
    return [f"{key}={value}" for key, value in assignments.items()]
