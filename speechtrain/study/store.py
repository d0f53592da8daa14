"""A study in its folder: the search space, the objectives, and every trial with its values.

All of this is stored in optuna's journal. The start of a trial is one record, and its end is one record. So a
process may be killed at any moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import optuna
from optuna.distributions import distribution_to_json, json_to_distribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from speechtrain.errors import ConfigError, RunError
from speechtrain.study.journal import JOURNAL, Claims, JournalLock
from speechtrain.study.objectives import Objective, read_objectives
from speechtrain.study.space import Space, grid

SAMPLERS = ("tpe", "random", "grid")
_NAME = "study"  # the name of the only study in a journal
# The names of our attributes in the journal: of the study, then of trials.
_SPEC = "spec"
_WORKER = "worker"
_OUTCOME = "outcome"
_ATTEMPTS = "attempts"

optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclass(frozen=True)
class StudySpec:
    """The definition of a study, which does not change."""

    space: Space
    objectives: tuple[Objective, ...]
    n_trials: int = 20  # including failed trials
    sampler: str = "tpe"
    seed: int = 1  # The values of trial n are sampled with the seed (seed, n).
    first: tuple[Mapping[str, Any], ...] = ()  # from ``first_assignments``
    fixed: tuple[str, ...] | None = None  # overrides of all trials, None if the keys are not the config's

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise ConfigError(f"sampler={self.sampler}: a study has {', '.join(SAMPLERS)}")
        if not self.space:
            raise ConfigError("a study needs a key to search, as 'optimizer.lr=tag(log,interval(1e-3,1e-2))'")

    def to_json(self) -> dict[str, Any]:
        """Return the content that :meth:`from_json` reads."""
        space = {name: distribution_to_json(parameter) for name, parameter in self.space.items()}
        objectives = [asdict(objective) for objective in self.objectives]
        content = {**vars(self), "space": space, "objectives": objectives, "first": list(self.first)}
        if self.fixed is not None:
            content["fixed"] = list(self.fixed)
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> StudySpec:
        """Return the definition from the content that :meth:`to_json` has written."""
        space = {name: json_to_distribution(text) for name, text in content["space"].items()}
        objectives = read_objectives(content["objectives"])
        fields = {**content, "space": space, "objectives": objectives, "first": tuple(content["first"])}
        if content["fixed"] is not None:
            fields["fixed"] = tuple(content["fixed"])
        return cls(**fields)


@dataclass(frozen=True)
class Outcome:
    """How a trial has ended."""

    status: str  # finished | target | time | pruned | refused | diverged | out_of_memory | failed
    numbers: Mapping[str, float] = field(default_factory=dict)  # the numbers in result.json
    error: str = ""  # the message of the error that has ended the trial


class Study:
    """A study in its folder. Processes and hosts that share the folder may use it at the same time."""

    def __init__(self, folder: Path, spec: StudySpec | None = None) -> None:
        """Open the study in ``folder``. With ``spec``, create it if the folder has none.

        Raises RunError if the folder has no study, and ConfigError if its study differs from ``spec``.
        """
        if spec is None and not (folder / JOURNAL).is_file():
            raise RunError(f"{folder} holds no study ({JOURNAL} is missing)")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lock = JournalLock(folder)
        self._claims: Claims | None = None
        with self._lock:
            backend = JournalFileBackend(str(folder / JOURNAL), lock_obj=self._lock)  # type: ignore[arg-type]
            self._storage = JournalStorage(backend)
            if spec is None:
                self.optuna, self.spec = self._load()
            else:
                self.optuna = self._create(spec)
                self.spec = spec

    def _load(self) -> tuple[optuna.Study, StudySpec]:
        """Return the stored study and its definition. Raises RunError if the journal has none."""
        # The sampler is not used: ``_sample`` creates a sampler for each trial.
        try:
            study = optuna.load_study(study_name=_NAME, storage=self._storage, sampler=RandomSampler())
            return study, StudySpec.from_json(study.user_attrs[_SPEC])
        except KeyError:
            raise RunError(f"{self.folder / JOURNAL} holds no definition of a study. Delete it") from None

    def _create(self, spec: StudySpec) -> optuna.Study:
        """Return a new study, or the stored study if it has this definition. ``n_trials`` may differ.

        Raises ConfigError if the stored study has another definition.
        """
        study = optuna.create_study(
            storage=self._storage,
            study_name=_NAME,
            sampler=RandomSampler(),
            directions=[objective.direction for objective in spec.objectives],
            load_if_exists=True,
        )
        content = spec.to_json()
        stored = study.user_attrs.get(_SPEC, content)
        for key in content:
            if key != "n_trials" and content[key] != stored.get(key):
                message = f"{self.folder} holds a study with another {key}"
                raise ConfigError(f"{message}. Set run_dir to a new folder")
        study.set_user_attr(_SPEC, content)
        return study

    def trials(self) -> list[FrozenTrial]:
        """Return all trials in the order of their numbers."""
        return self.optuna.get_trials(deepcopy=False)

    def claim(self, count: int) -> list[FrozenTrial]:
        """Return up to ``count`` trials that this process has now claimed.

        These are unfinished trials whose process has ended, then new trials. Trials of ``ask`` are left out.
        """
        if self._claims is None:
            self._claims = Claims(self.folder)
        trials: list[FrozenTrial] = []
        with self._lock:
            for trial in self.trials():
                is_unfinished = trial.state == TrialState.RUNNING and trial.user_attrs[_WORKER] is None
                if len(trials) < count and is_unfinished and self._claims.claim(trial.number):
                    trials.append(trial)
            while len(trials) < count and not self.is_full():
                trial = self._add_trial(worker=None)
                self._claims.claim(trial.number)
                trials.append(trial)
        return trials

    def release(self, number: int) -> None:
        """Release the claim of a trial. If the trial is unfinished, ``claim`` returns it again."""
        if self._claims is not None:
            self._claims.release(number)

    def ask(self, worker: str) -> FrozenTrial | None:
        """Return a new trial for a program of the user, or None if the study is full.

        If ``worker`` is not empty and has an unfinished trial, return this trial.
        """
        with self._lock:
            for trial in self.trials():
                is_unfinished = trial.state == TrialState.RUNNING
                if worker and is_unfinished and trial.user_attrs[_WORKER] == worker:
                    return trial
            if self.is_full():
                return None
            return self._add_trial(worker)

    def is_full(self) -> bool:
        """Return whether all trials of the study have been started. Some of them may be unfinished."""
        count = self.spec.n_trials
        if self.spec.sampler == "grid":
            count = min(count, len(grid(self.spec.space)))
        return len(self.trials()) >= count

    def _add_trial(self, worker: str | None) -> FrozenTrial:
        """Store the next trial as one record, and return it.

        ``worker`` is None for a trial that a process claims. ``ask`` passes the name of a program, or "".
        """
        trials = self.trials()
        trial = create_trial(
            state=TrialState.RUNNING,
            params=self._sample(trials),
            distributions=dict(self.spec.space),
            user_attrs={_WORKER: worker, _ATTEMPTS: 0},
        )
        self.optuna.add_trial(trial)
        return self.trials()[-1]

    def _sample(self, trials: Sequence[FrozenTrial]) -> dict[str, Any]:
        """Return the assignments of the trial that follows ``trials``.

        They are sampled in a copy of the study in memory. So they depend only on ``trials`` and the seed.
        """
        number = len(trials)
        seed_sequence = numpy.random.SeedSequence([self.spec.seed, number])
        seed = int(seed_sequence.generate_state(1)[0])
        sampler: BaseSampler = RandomSampler(seed=seed)
        if self.spec.sampler == "tpe":
            sampler = TPESampler(seed=seed)
        study = optuna.create_study(sampler=sampler, directions=self.optuna.directions)
        study.add_trials(trials)
        # A study in memory returns an enqueued trial next, and samples only the keys that it lacks.
        if self.spec.sampler == "grid":
            study.enqueue_trial(grid(self.spec.space)[number])
        elif number < len(self.spec.first):
            study.enqueue_trial(dict(self.spec.first[number]))
        return study.ask(dict(self.spec.space)).params

    def _open_trial(self, number: int) -> optuna.trial.Trial:
        """Return optuna's object of an unfinished trial. Raises RunError for any other number.

        Its methods that write are called under the lock of the journal. optuna acquires its own lock first,
        so another thread that has the lock of the journal would wait forever.
        """
        trials = self.trials()
        if not 0 <= number < len(trials) or trials[number].state.is_finished():
            raise RunError(f"trial {number} is finished or does not exist")
        study_id = self._storage.get_study_id_from_name(_NAME)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
        return optuna.trial.Trial(self.optuna, trial_id)

    def attempt(self, number: int) -> int:
        """Add 1 to the stored number of attempts of a trial, and return the number."""
        with self._lock:
            trial = self._open_trial(number)
            attempts = int(trial.user_attrs[_ATTEMPTS]) + 1
            trial.set_user_attr(_ATTEMPTS, attempts)
            return attempts

    def report(self, number: int, values: Sequence[float]) -> bool:
        """Store the validations of an unfinished trial, and return whether the median rule stops the trial.

        ``values`` has the first objective at each validation so far. Those that are stored already stay. NaN
        is worse than any number.
        """
        worst = self.spec.objectives[0].worst((-math.inf, math.inf))
        with self._lock:
            trial = self._open_trial(number)
            for index in range(len(self.trials()[number].intermediate_values), len(values)):
                trial.report(worst if math.isnan(values[index]) else values[index], index)
            return trial.should_prune()  # The median rule is optuna's default.

    def finish(
        self,
        number: int,
        outcome: Outcome,
        values: Sequence[float] | None = None,
        state: TrialState = TrialState.FAIL,
    ) -> None:
        """Store the end of a trial.

        With ``values``, one for each objective, the trial is complete. Otherwise it has the state ``state``.
        Raises RunError if the trial does not exist or is finished.
        """
        with self._lock:
            trial = self._open_trial(number)
            trial.set_user_attr(_OUTCOME, asdict(outcome))
            if values is not None:
                state = TrialState.COMPLETE
                for objective, value in zip(self.spec.objectives, values, strict=True):
                    if objective.threshold is not None:
                        trial.set_constraint(objective.name, objective.excess(value))
            self.optuna.tell(number, values, state=state)

    def complete_trials(self) -> list[FrozenTrial]:
        """Return the trials that have values."""
        return [trial for trial in self.trials() if trial.state == TrialState.COMPLETE]

    def worst_values(self) -> list[float] | None:
        """Return the worst value of each objective in all complete trials, or None if there are none."""
        trials = self.complete_trials()
        if not trials:
            return None
        worst = []
        for index, objective in enumerate(self.spec.objectives):
            worst.append(objective.worst([trial.values[index] for trial in trials]))
        return worst

    def best(self) -> FrozenTrial | None:
        """Return the best complete trial by the first objective, or None if no trial is complete.

        Trials within all thresholds are better than all others.
        """
        return min(self.complete_trials(), key=self._sort_key, default=None)

    def _sort_key(self, trial: FrozenTrial) -> tuple[float, float]:
        """Order trials by the sum of their excesses over thresholds, then by the first objective."""
        excess = sum([max(0.0, value) for value in trial.constraints.values()])
        value = trial.values[0]
        if self.spec.objectives[0].direction == "maximize":
            value = -value
        return excess, value


def outcome_of(trial: FrozenTrial) -> Outcome:
    """Return how a trial has ended. The status of an unfinished trial is ``unfinished``."""
    content = trial.user_attrs.get(_OUTCOME)
    if content is None or not trial.state.is_finished():
        return Outcome("unfinished")
    return Outcome(**content)
