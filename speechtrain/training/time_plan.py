"""The number of updates that ``trainer.max_hours`` has room for: timed once, kept with the run, corrected."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from speechtrain.batch import Batch
from speechtrain.checkpoint.whole import on_host
from speechtrain.distributed.group import Group
from speechtrain.errors import RunError
from speechtrain.files import read_json, write_json
from speechtrain.training.run_state import Parts

FILE = "plan.json"
LATEST = 1.05  # of max_hours: where a run ends that is slower than its plan
_SETTLE = (0.01, 5.0)  # share of the budget, and the most seconds, of updates that are not timed
_MEASURE = (0.02, 10.0)  # the same of those that are, and of a validation
_VALIDATIONS, _VALIDATION_SHARE = 20, 0.1  # the most of a run, and of its time
_FIRST_LOOK, _LAST_LOOK = 0.25, 0.95  # of the updates: where the plan is first and last corrected
_FEWEST = 5  # updates whose speed is believed


@dataclass
class TimePlan:
    """How many updates a run makes, and what that was derived from; ``plan.json`` holds it."""

    hours: float
    updates: int
    validate_every: int
    seconds_per_update: float
    seconds_per_validation: float
    revisions: list[list[float]] = field(default_factory=list)  # step, wall seconds, updates from then on

    def after(self, step: int) -> list[float]:
        """The last revision up to ``step``, or the beginning."""
        return max((one for one in self.revisions if one[0] <= step), default=[0, 0.0, self.updates])

    def updates_at(self, step: int) -> int:
        """The number of updates as it was planned after ``step`` of them."""
        return int(self.after(step)[2])

    def is_due(self, step: int) -> bool:
        """True where the plan is compared with the clock: a quarter into it, then half way to its end."""
        last, _, updates = self.after(step - 1)
        share = 0.5 if last else _FIRST_LOOK
        return step == last + max(_FEWEST, int((updates - last) * share)) and step < _LAST_LOOK * updates

    def extend(self, hours: float, step: int, wall_s: float) -> None:
        """Plan for other ``hours``, by the speed of the updates so far."""
        self.hours = hours
        self.revisions = [one for one in self.revisions if one[0] < step]
        self.revise(step, wall_s, self.seconds_per_validation)

    def revise(self, step: int, wall_s: float, validation_s: float) -> None:
        """Plan the updates after ``step`` by the speed since the last revision; an entry of it is kept."""
        if self.after(step)[0] == step > 0:
            return
        before, then, _ = self.after(step)
        validations = step // self.validate_every - int(before) // self.validate_every
        spent = max(1e-9, wall_s - then - validations * validation_s)
        per_update = spent / (step - before) if step > before else self.seconds_per_update
        left = self.hours * 3600 - wall_s
        more = updates_within(left, per_update, validation_s, self.validate_every)
        self.revisions.append([step, round(wall_s, 3), step + more])


def updates_within(seconds: float, per_update: float, per_validation: float, every: int) -> int:
    """Updates in so many seconds with a validation after each ``every`` of them and one at the end."""
    return max(1, int((seconds - per_validation) / (per_update + per_validation / every)))


def time_plan(
    hours: float,
    spent_s: float,
    per_update: float,
    per_validation: float,
    per_epoch: float,
    every: int | None,
) -> TimePlan:
    """Plan a run of ``hours``, of which ``spent_s`` seconds are over.

    A validation follows ``every`` updates; null: each epoch, but at most twenty times and in a tenth of the
    time.
    """
    left = hours * 3600 - spent_s
    if every is None:
        updates = updates_within(left, per_update, per_validation, max(1, round(left / per_update)))
        affordable = _VALIDATION_SHARE * left / max(per_validation, 1e-9)
        most = max(1, math.floor(min(_VALIDATIONS, affordable, updates / per_epoch)))
        every = max(1, math.ceil(updates / most))
    updates = updates_within(left, per_update, per_validation, every)
    return TimePlan(hours, updates, every, round(per_update, 6), round(per_validation, 4))


@dataclass(eq=False)
class Stopwatch:
    """Times updates and a validation; all ranks call it alike."""

    group: Group
    budget_s: float
    clock: Callable[[], float]
    stop_requested: Callable[[], bool]

    def updates(self, update: Callable[[], float]) -> float:
        """Seconds for each unit of what ``update`` says it has done, of updates after some to settle."""
        for share, most in (_SETTLE, _MEASURE):
            begun, done, count = self.clock(), 0.0, 0
            while count < 2 or not self._is_over(begun, share, most):
                done += update()
                count += 1
        return (self.clock() - begun) / max(done, 1e-9)

    def validation(
        self, sets: dict[str, Iterable[Batch]], evaluate: Callable[[dict[str, Iterable[Batch]]], object]
    ) -> float:
        """Seconds of evaluating ``sets``, from a part of one that says how many ``seconds`` it has."""
        spent = 0.0
        for name, batches in sets.items():
            begun, heard, whole = self.clock(), [0.0], getattr(batches, "seconds", 0.0)
            evaluate({name: self._first(batches, begun, heard=heard, whole=whole)})
            spent += (self.clock() - begun) * max(1.0, whole / max(heard[0], 1e-9) if whole else 1.0)
        return spent

    def _first(
        self, batches: Iterable[Batch], begun: float, heard: list[float], whole: float
    ) -> Iterator[Batch]:
        for batch in batches:
            yield batch
            heard[0] += batch.seconds
            if whole and self._is_over(begun, *_MEASURE):
                return

    def _is_over(self, begun: float, share: float, most: float) -> bool:
        spent = self.clock() - begun
        return self.group.any(self.stop_requested() or spent >= min(share * self.budget_s, most))


@contextmanager
def rewound(parts: Parts) -> Iterator[None]:
    """A context after which ``parts``, of a run that has not begun, are as they were, bit by bit."""
    states = {name: copy.deepcopy(on_host(part.state_dict())) for name, part in parts.states.items()}
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    for name, part in parts.states.items():
        part.load_state_dict(states[name])
    torch.set_rng_state(streams[0])
    random.setstate(streams[1])
    np.random.set_state(streams[2])


def shared(plan: TimePlan | None, group: Group) -> TimePlan | None:
    """Rank 0's plan, on every rank."""
    count = 0 if plan is None or group.world.rank else 5 + 3 * len(plan.revisions)
    size = int(group.sum(torch.tensor([count], dtype=torch.float64))[0])
    numbers = torch.zeros(size, dtype=torch.float64)
    if count and plan is not None:
        *own, revisions = asdict(plan).values()
        numbers += torch.tensor([*own, *(number for one in revisions for number in one)], dtype=torch.float64)
    found = group.sum(numbers).tolist() if size else []
    if not found:
        return None
    revisions = [found[at : at + 3] for at in range(5, size, 3)]
    return TimePlan(found[0], int(found[1]), int(found[2]), found[3], found[4], revisions)


def read(folder: Path) -> TimePlan | None:
    """The plan that a run has kept; None if it has none. Raises RunError for a damaged one."""
    if not (path := folder / FILE).exists():
        return None
    try:
        plan = TimePlan(**read_json(path))
        numbers = [*list(asdict(plan).values())[:-1], *(number for one in plan.revisions for number in one)]
        is_sound = all(isinstance(number, int | float) for number in numbers)
        if not is_sound or min(plan.updates, plan.validate_every) < 1 or len(numbers) % 3 != 2:
            raise ValueError("its values are not those of a plan")
    except (TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error}); restore it, or use another run_dir") from None
    return plan


def write(plan: TimePlan, folder: Path) -> None:
    write_json(folder / FILE, asdict(plan))
