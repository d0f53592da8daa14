"""The number of updates that ``trainer.max_hours`` has room for, as the clock corrects it during the run."""

from __future__ import annotations

import json
import math
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch

from speechtrain.distributed.group import Group
from speechtrain.errors import RunError
from speechtrain.files import read_json, write_json

FILE = "plan.json"
SPACING = 0.02  # share of the run between two revisions
VALIDATION_SHARE = 0.1  # the largest share of the time for validation, unless one validation takes more
_MAX_VALIDATIONS = 20


@dataclass(frozen=True)
class Revision:
    """The plan as it was corrected after an update, or after the validation that follows it."""

    step: int  # updates so far
    wall_s: float  # seconds of the run so far
    updates: int  # planned updates of the whole run
    validated: int  # the step of the latest validation
    validate_at: int  # the step of the next validation
    share: float  # the share of the run that was done, by the plans so far

    def share_at(self, step: int) -> float:
        """Return the share of the run that is done after ``step`` updates, from 0 to 1."""
        updates_left = max(1, self.updates - self.step)
        return self.share + (1 - self.share) * min(1.0, (step - self.step) / updates_left)


@dataclass
class TimePlan:
    """The present plan of a run and all its revisions. ``plan.json`` holds it.

    A continued run applies the stored revisions at the same steps, so an interruption changes no update.
    """

    hours: float  # the planned duration of all starts
    updates: int = 0  # planned updates of the whole run
    validate_every: int = 0  # updates from one validation to the next
    seconds_per_update: float = 0.0  # the median of the latest updates
    seconds_per_validation: float = 0.0  # 0: not measured yet
    revisions: list[Revision] = field(
        default_factory=list
    )  # all revisions in order, each a list of its values

    @property
    def seconds(self) -> float:
        return self.hours * 3600

    def until(self, step: int, validated: int) -> list[Revision]:
        """Return the revisions made up to update ``step`` and the validation of step ``validated``."""
        return [r for r in self.revisions if (r.step, r.validated) <= (step, validated)]

    def is_due(self, step: int, validated: int) -> bool:
        """Return whether the plan must be revised here.

        Steps 1, 2, 4, 8, … come first, then every 2 % of the updates, and half of the rest near the end. A
        revision also follows each validation.
        """
        if not self.revisions:
            return step > 0
        latest = self.revisions[-1]
        if (step, validated) <= (latest.step, latest.validated) or step >= latest.updates:
            return False
        half = (latest.updates - latest.step) // 2
        spacing = min(latest.step, math.ceil(SPACING * latest.updates), half)
        return validated > latest.validated or step >= latest.step + max(1, spacing)

    def revise(self, step: int, validated: int, wall_s: float, validate_every: int | None) -> None:
        """Plan the rest of the run from ``wall_s`` on, by the present seconds per update and validation.

        The rest has a whole number of validations, of which one is the end. With ``validate_every`` None they
        are evenly spaced. There are at most 20 in a run, and at least nine times their duration lies between
        two. Otherwise they have that spacing, but the last interval is longer.
        """
        per_update, per_validation = self.seconds_per_update, self.seconds_per_validation
        if validate_every is None:
            period = max(self.seconds / _MAX_VALIDATIONS, per_validation / VALIDATION_SHARE)
        else:
            period = validate_every * per_update + per_validation
        seconds_left = self.seconds - wall_s
        validations = max(1, int(((step - validated) * per_update + seconds_left) / period))
        seconds_left -= validations * per_validation
        self.updates = step + max(0, int(seconds_left / per_update))
        spacing = validate_every or math.ceil((self.updates - validated) / validations)
        self.validate_every = max(1, spacing)
        validate_at = max(step, validated + self.validate_every) if validations > 1 else self.updates
        share = step / self.updates
        if self.revisions:
            share = self.revisions[-1].share_at(step)
        revision = Revision(step, wall_s, self.updates, validated, validate_at, share)
        self.revisions.append(revision)

    def content(self) -> dict[str, Any]:
        """Return the content of ``plan.json``."""
        return {**vars(self), "revisions": [astuple(revision) for revision in self.revisions]}


def shared(plan: TimePlan | None, group: Group) -> TimePlan | None:
    """Return rank 0's plan on every rank."""
    content = b""
    if plan is not None and not group.world.rank:
        content = json.dumps(plan.content()).encode()
    size = int(group.sum(torch.tensor([float(len(content))]))[0])
    numbers = torch.zeros(size)
    numbers[: len(content)] = torch.tensor(list(content))
    content = bytes(group.sum(numbers).int().tolist())
    return _plan_of(json.loads(content)) if content else None


def _plan_of(content: dict[str, Any]) -> TimePlan:
    """Return the plan of the content of ``plan.json``. Raises TypeError or ValueError."""
    rows = content["revisions"]
    plan = TimePlan(**{**content, "revisions": [Revision(*row) for row in rows]})
    numbers = [value for name, value in content.items() if name != "revisions"]
    if not all(isinstance(number, int | float) for number in sum(rows, numbers)) or plan.updates < 1:
        raise ValueError("a value is not a number of a plan")
    return plan


def read(folder: Path) -> TimePlan | None:
    """Return the plan that a run has kept, or None if it has none. Raises RunError for a damaged one."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        return _plan_of(read_json(path))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error}); restore it, or use another run_dir") from None


def write(plan: TimePlan, folder: Path) -> None:
    write_json(folder / FILE, plan.content())
