"""Learning-rate schedules: the rate of each optimizer update.

``rate(step)`` is the rate of update number ``step``, counted from 1. The reference systems mostly count the
completed updates, n = step − 1. Each class documents which number its formula uses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_WARMUP_SHARE, _MAX_WARMUP = 0.08, 32_000  # wav2vec 2.0 base has 32,000 of 400,000 updates


class Schedule(ABC):
    """The learning rate as a function of the update's number."""

    warmup: int = 0  # number of updates until the peak

    @abstractmethod
    def rate(self, step: int) -> float:
        """Return the rate of update number ``step``, 1 or above."""

    def plan(self, total: int, step: int = 0) -> None:  # noqa: B027 - nothing is a sensible default
        """Fit a decay to ``total`` updates after update ``step``, without a jump of the rate."""

    def state_dict(self) -> dict[str, Any]:
        """Return the plan of the first start, which a resumed run must keep."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - nothing is a sensible default
        """Restore the plan of an earlier start. It overrides the constructor's plan."""


def _not_negative(schedule: Schedule, *names: str) -> None:
    for name in names:
        setting = getattr(schedule, name, None)
        if setting is not None and not setting >= 0:
            raise ValueError(f"{name} is {setting}. It must be 0 or above")


def _warmup(step: float, warmup_steps: int) -> float:
    """Return the fraction of the peak on a straight line that reaches 1 at update ``warmup_steps``."""
    return min(1.0, step / warmup_steps) if warmup_steps else 1.0


@dataclass(kw_only=True)
class _Planned(Schedule):
    """A decay over a number of updates. The first start fixes the number, and every resume keeps it.

    ``warmup_steps`` null is 8 % of these updates, at most 32,000. If a plan by time is corrected, the rate
    continues from the same position in the warm-up or the decay. The remaining updates cover the remaining
    warm-up and decay.
    """

    warmup_steps: int | None = 0
    steps: int | None = None
    planned_steps: int | None = None
    corrected_at = 0  # the update of the latest correction, or 0
    position = 0.0  # that update's number in a run that has the present plan from its start

    def __post_init__(self) -> None:
        _not_negative(self, "peak", "warmup_steps", "power", "end", "min_lr")
        total = self.planned_steps if self.steps is None else self.steps
        if total is None:
            raise ValueError("steps is null. Set it, or limit trainer.max_steps or max_epochs")
        if total < 1:
            raise ValueError(f"steps is {total}. It must be above 0")
        self._plan(total)

    def _plan(self, total: int) -> None:
        self.total = total
        if self.warmup_steps is None:
            self.warmup = min(_MAX_WARMUP, round(_WARMUP_SHARE * total))
        else:
            self.warmup = self.warmup_steps

    @property
    def begin(self) -> int:
        """The update after which the decay begins."""
        return self.warmup

    def plan(self, total: int, step: int = 0) -> None:
        if self.steps is not None or total == self.total:
            return
        position, begin, end = self._planned(step + 1) - 1, self.begin, self.total
        self._plan(total)
        self.corrected_at, self.position = 0, 0.0
        if not 0 < step < end:  # A longer plan for a run that has ended begins a new decay.
            return
        if position < begin:
            self.position = position / begin * self.begin
        else:
            decay = (position - begin) / (end - begin)
            self.position = self.begin + decay * (total - self.begin)
        self.corrected_at = step

    def _planned(self, step: int) -> float:
        """Return the number of update ``step`` in a run that has the present plan from its start."""
        if not self.corrected_at:
            return step
        share = (step - 1 - self.corrected_at) / max(1, self.total - self.corrected_at)
        return self.position + 1 + share * (self.total - self.position)

    def progress(self, position: float, begin: int) -> float:
        """Return the fraction of the way from ``begin`` updates to the plan's end, from 0 to 1."""
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
        _not_negative(self, "peak", "warmup_steps")
        self.warmup = self.warmup_steps

    def rate(self, step: int) -> float:
        return self.peak * _warmup(step, self.warmup_steps)


@dataclass
class WarmupHoldExponential(Schedule):
    """MLPerf's RNN-T: linear warm-up, a plateau, then a factor ``gamma`` for each epoch.

    With W = warmup_epochs · steps_per_epoch and H likewise: ``peak · (step + 1) / (W + 1)`` before
    step W, ``peak`` before step W + H, then ``peak · gamma^(epoch − warmup_epochs − hold_epochs)``
    with epochs counted from 1, but never below ``min_lr``. MLPerf also counts steps from 1.
    """

    peak: float
    warmup_epochs: int = 6
    hold_epochs: int = 40
    gamma: float = 0.935
    min_lr: float = 1e-5
    steps_per_epoch: int = field(kw_only=True)

    def __post_init__(self) -> None:
        _not_negative(self, "peak", "warmup_epochs", "hold_epochs", "min_lr")
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
        position = self._planned(step) - 1
        if position < self.warmup:
            return self.peak * _warmup(position, self.warmup)
        left = 1.0 - self.progress(position, self.warmup)
        decay = left**self.power if left else 0.0
        return self.end + (self.peak - self.end) * decay


@dataclass
class Cosine(_Planned):
    """Linear warm-up, then half a cosine from ``peak`` to ``end`` (Loshchilov and Hutter, 2017), as in NeMo.

    With n = step − 1 completed updates: ``peak · step / warmup_steps`` up to update ``warmup_steps``,
    then ``end + (peak − end) · (1 + cos(π · progress)) / 2``. After the planned steps the rate stays at
    ``end``, but the cosine would rise again.
    """

    peak: float
    end: float = 0.0

    def rate(self, step: int) -> float:
        number = self._planned(step)
        if number <= self.warmup:
            return self.peak * _warmup(number, self.warmup)
        progress = self.progress(number - 1, self.warmup)
        cosine = math.cos(math.pi * progress)
        return self.end + (self.peak - self.end) * (1.0 + cosine) / 2.0


@dataclass
class TriStage(_Planned):
    """Linear warm-up, a plateau, then an exponential decay (Baevski et al., 2020, for fine-tuning).

    ``phases`` are the shares of warm-up and plateau in the updates. The first update has ``first · peak``.
    The last update and the updates after it have ``last · peak``.
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
        number = self._planned(step)
        if number <= self.warmup:
            fraction = self.first + (1.0 - self.first) * (number - 1) / self.warmup
            return self.peak * fraction
        decay_begin = round(sum(self.phases) * self.total)
        decay = self.progress(number - 1, decay_begin)
        return float(self.peak * self.last**decay)


@dataclass
class IntelQuadratic(_Planned):
    """Intel's character RNN-T: a linear warm-up times a quadratic decay over the whole run.

    With n = step − 1 completed updates of N: ``min(1, n / warmup_steps) · max(peak · ((N − n) / N)²,
    min_lr)``. As in Intel's code, the first update has rate 0 if the warm-up is not 0. The warm-up counts
    updates of the run, even if the plan has been corrected.
    """

    begin = 0
    peak: float
    min_lr: float = 1e-5
    warmup_steps: int | None = field(default=8000, kw_only=True)

    def rate(self, step: int) -> float:
        left = 1.0 - self.progress(self._planned(step) - 1, 0)
        return _warmup(step - 1, self.warmup) * max(self.peak * left**2, self.min_lr)
