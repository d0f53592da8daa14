"""Learning-rate schedules: the rate of each optimizer update.

``rate(step)`` is the rate of update number ``step``, counted from 1. The reference systems mostly count the
completed updates, n = step − 1. Each class documents which number its formula uses. ``peak`` is the highest
rate of a schedule.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The default warm-up is this fraction of the planned updates, at most this number of updates. wav2vec 2.0
# base has 32,000 of 400,000 updates.
_WARMUP_SHARE, _MAX_WARMUP = 0.08, 32_000


class Schedule(ABC):
    """The learning rate as a function of the update's number."""

    warmup: int = 0  # number of updates until the peak

    @abstractmethod
    def rate(self, step: int) -> float:
        """Return the rate of update number ``step``, 1 or above."""

    def plan(self, total: int, step: int = 0) -> None:  # noqa: B027 - nothing is a sensible default
        """Change the planned updates of the run to ``total``, after ``step`` updates.

        A schedule with a decay then reaches its end after ``total`` updates, without a jump of the rate.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the plan of the run. A resumed run has it until its limits change."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - nothing is a sensible default
        """Restore the plan of an earlier start. It overrides the constructor's plan."""


def _require_not_negative(schedule: Schedule, *names: str) -> None:
    """Raise ValueError for the first of the attributes ``names`` that is negative. None is valid."""
    for name in names:
        setting = getattr(schedule, name, None)
        if setting is not None and not setting >= 0:
            raise ValueError(f"{name} is {setting}. It must be 0 or above")


def _warmup(step: float, warmup_steps: int) -> float:
    """Return the fraction of the peak at ``step``, which rises linearly to 1 at ``warmup_steps``."""
    return min(1.0, step / warmup_steps) if warmup_steps else 1.0


@dataclass(kw_only=True)
class _Planned(Schedule):
    """A warm-up, then a decay that ends after the planned updates.

    ``steps`` are the planned updates, which then never change. If it is null, they follow from the limits of
    the run (``planned_steps``). If ``warmup_steps`` is null, the warm-up is 8 % of the planned updates, at
    most 32,000.

    A plan by time is corrected during the run, and a run may continue with other limits. The rate then
    continues from the same position in the warm-up or the decay, and the rest of the schedule is stretched or
    compressed to the remaining updates. The position is the number of completed updates at which the present
    plan, if it had been valid from the start, would have the same rate. A run that has completed its plan
    gets the rates of the longer plan, as if that had been valid from the start.
    """

    warmup_steps: int | None = 0
    steps: int | None = None
    planned_steps: int | None = None
    corrected_at = 0  # the number of updates before the latest correction, or 0
    position = 0.0  # the position at the latest correction

    def __post_init__(self) -> None:
        _require_not_negative(self, "peak", "warmup_steps", "power", "end", "min_lr")
        total = self.planned_steps if self.steps is None else self.steps
        if total is None:
            raise ValueError("steps is null. Set it, or limit trainer.max_steps or max_epochs")
        if total < 1:
            raise ValueError(f"steps is {total}. It must be above 0")
        self._plan(total)

    def _plan(self, total: int) -> None:
        """Set the planned updates and the warm-up."""
        self.total = total
        if self.warmup_steps is None:
            self.warmup = min(_MAX_WARMUP, round(_WARMUP_SHARE * total))
        else:
            self.warmup = self.warmup_steps

    @property
    def begin(self) -> int:
        """The number of updates before the decay."""
        return self.warmup

    def plan(self, total: int, step: int = 0) -> None:
        if self.steps is not None or total == self.total:
            return
        old_position, old_begin, old_total = self._position_of(step + 1) - 1, self.begin, self.total
        self._plan(total)
        self.corrected_at, self.position = 0, 0.0
        if not 0 < step < old_total:  # The run has not begun, or has completed the old plan.
            return
        if old_position < old_begin:
            self.position = old_position / old_begin * self.begin
        else:
            decay = (old_position - old_begin) / (old_total - old_begin)
            self.position = self.begin + decay * (total - self.begin)
        self.corrected_at = step

    def _position_of(self, step: int) -> float:
        """Return the position after update ``step``, which is ``step`` if the plan was never corrected."""
        if not self.corrected_at:
            return step
        share_of_rest = (step - 1 - self.corrected_at) / max(1, self.total - self.corrected_at)
        return self.position + 1 + share_of_rest * (self.total - self.position)

    def progress(self, position: float, begin: int) -> float:
        """Return the fraction of the updates from ``begin`` to the end of the plan, from 0 to 1."""
        if position >= self.total:
            return 1.0
        return max(0.0, (position - begin) / (self.total - begin)) if begin < self.total else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.total, "corrected_at": self.corrected_at, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._plan(int(state["steps"]))
        self.corrected_at = int(state["corrected_at"])
        self.position = float(state["position"])


@dataclass
class Constant(Schedule):
    """A constant rate ``peak``, after a linear warm-up from ``peak / warmup_steps``."""

    peak: float
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _require_not_negative(self, "peak", "warmup_steps")
        self.warmup = self.warmup_steps

    def rate(self, step: int) -> float:
        return self.peak * _warmup(step, self.warmup_steps)


@dataclass
class WarmupHoldExponential(Schedule):
    """MLPerf's RNN-T: linear warm-up, a plateau, then a factor ``gamma`` for each epoch.

    W = warmup_epochs · steps_per_epoch and H = hold_epochs · steps_per_epoch are the updates of warm-up and
    plateau. As in MLPerf, steps and epochs are counted from 1. The rate is never below ``min_lr``:

    - before step W: ``peak · (step + 1) / (W + 1)``
    - up to step W + H: ``peak``
    - after it: ``peak · gamma^(epoch − warmup_epochs − hold_epochs)``
    """

    peak: float
    warmup_epochs: int = 6
    hold_epochs: int = 40
    gamma: float = 0.935
    min_lr: float = 1e-5
    steps_per_epoch: int = field(kw_only=True)

    def __post_init__(self) -> None:
        _require_not_negative(self, "peak", "warmup_epochs", "hold_epochs", "min_lr")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma is {self.gamma}. It must be above 0 and at most 1")
        if self.steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch is {self.steps_per_epoch}. It must be above 0")
        self.warmup = self.warmup_epochs * self.steps_per_epoch

    def rate(self, step: int) -> float:
        if step < self.warmup:
            rate = self.peak * (step + 1) / (self.warmup + 1)
        else:
            epoch = (step - 1) // self.steps_per_epoch + 1
            # The last update of epoch warmup_epochs + hold_epochs still has the peak.
            decay_epochs = max(0, epoch - self.warmup_epochs - self.hold_epochs)
            rate = self.peak * self.gamma**decay_epochs
        return max(rate, self.min_lr)

    def state_dict(self) -> dict[str, Any]:
        return {"steps_per_epoch": self.steps_per_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps_per_epoch = max(1, int(state["steps_per_epoch"]))
        self.warmup = self.warmup_epochs * self.steps_per_epoch


@dataclass
class Polynomial(_Planned):
    """fairseq's polynomial decay, the schedule of wav2vec 2.0.

    With n = step − 1 completed updates: ``peak · n / warmup_steps`` while n ≤ warmup_steps, then from
    ``peak`` to ``end`` along ``(1 − progress)^power``, and ``end`` from n = ``steps`` on. As in fairseq's
    trainer, the first update has rate 0 if the warm-up is not 0.
    """

    peak: float
    power: float = 1.0
    end: float = 0.0

    def rate(self, step: int) -> float:
        completed = self._position_of(step) - 1
        if completed < self.warmup:
            return self.peak * _warmup(completed, self.warmup)
        remaining = 1.0 - self.progress(completed, self.warmup)
        # 0.0 ** 0 would be 1, but the rate is ``end`` here also with a power of 0.
        factor = remaining**self.power if remaining else 0.0
        return self.end + (self.peak - self.end) * factor


@dataclass
class Cosine(_Planned):
    """Linear warm-up, then half a cosine from ``peak`` to ``end`` (Loshchilov and Hutter, 2017), as in NeMo.

    With n = step − 1 completed updates: ``peak · step / warmup_steps`` up to update ``warmup_steps``,
    then ``end + (peak − end) · (1 + cos(π · progress)) / 2``. After the planned updates the rate stays at
    ``end``, although the cosine would rise again.
    """

    peak: float
    end: float = 0.0

    def rate(self, step: int) -> float:
        position = self._position_of(step)
        if position <= self.warmup:
            return self.peak * _warmup(position, self.warmup)
        progress = self.progress(position - 1, self.warmup)
        cosine = math.cos(math.pi * progress)
        return self.end + (self.peak - self.end) * (1.0 + cosine) / 2.0


@dataclass
class TriStage(_Planned):
    """Linear warm-up, a plateau, then an exponential decay (Baevski et al., 2020, for fine-tuning).

    ``phases`` are two fractions of the planned updates, of the warm-up and of the plateau. The first update
    has the rate ``first · peak``. The updates after the planned ones have ``last · peak``. As in fairseq, the
    last planned update is one step of the decay before it: 1.006 · ``last · peak`` at 1,000 updates.
    """

    peak: float
    phases: list[float] = field(default_factory=lambda: [0.1, 0.4])
    first: float = 0.01
    last: float = 0.05
    warmup_steps: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if len(self.phases) != 2 or min(self.phases) < 0 or sum(self.phases) > 1:
            raise ValueError(
                f"phases is {self.phases}. Set the shares of warm-up and plateau, together at most 1"
            )
        if not (0 <= self.first <= 1 and 0 < self.last <= 1):
            raise ValueError(f"first is {self.first}, last is {self.last}. Both are shares of the peak")
        super().__post_init__()

    def _plan(self, total: int) -> None:
        self.total, self.warmup = total, round(self.phases[0] * total)

    def rate(self, step: int) -> float:
        position = self._position_of(step)
        if position <= self.warmup:
            fraction = self.first + (1.0 - self.first) * (position - 1) / self.warmup
            return self.peak * fraction
        decay_begin = round(sum(self.phases) * self.total)
        progress = self.progress(position - 1, decay_begin)
        return float(self.peak * self.last**progress)


@dataclass
class IntelQuadratic(_Planned):
    """Intel's character RNN-T: a linear warm-up times a quadratic decay over the whole run.

    With n = step − 1 completed updates of N: ``min(1, n / warmup_steps) · max(peak · ((N − n) / N)²,
    min_lr)``. As in Intel's code, the first update has the rate 0 if the warm-up is not 0. A correction of
    the plan does not change a warm-up of ``warmup_steps``, which counts updates of the run.
    """

    begin = 0  # The decay begins with the first update.
    peak: float
    min_lr: float = 1e-5
    warmup_steps: int | None = field(default=8000, kw_only=True)

    def rate(self, step: int) -> float:
        completed = self._position_of(step) - 1
        remaining = 1.0 - self.progress(completed, 0)
        # A warm-up that is a share of the plan is stretched with it.
        warmup_updates = completed if self.warmup_steps is None else step - 1
        return _warmup(warmup_updates, self.warmup) * max(self.peak * remaining**2, self.min_lr)
