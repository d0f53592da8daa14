"""A study in its folder: the search space, the objectives, and every trial with its values.

All of this is stored in optuna's journal. The start of a trial is one record, and its end is one record. So a
process may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy
import optuna
from optuna.distributions import distribution_to_json, json_to_distribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from speechtrain.errors import ConfigError, RunError
from speechtrain.files import open_append
from speechtrain.study.objectives import Objective
from speechtrain.study.space import Space, grid

JOURNAL = "study.journal"
"""The trials of a study, one record in each line."""
_LOCK = "study.lock"
_CLAIMS = "claims"
SAMPLERS = ("tpe", "random", "grid")
_NAME = "study"  # the name of the only study in a journal
# The names of our attributes in the journal: of the study, then of trials.
_SPEC = "spec"
_WORKER = "worker"
_OUTCOME = "outcome"

optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclass(frozen=True)
class StudySpec:
    """The definition of a study, which does not change."""

    space: Space
    objectives: list[Objective]
    n_trials: int = 20  # including failed trials
    sampler: str = "tpe"
    seed: int = 1  # The values of trial n are sampled with the seed (seed, n).
    first: list[dict[str, Any]] = field(default_factory=list)  # from ``first_assignments``
    fixed: list[str] = field(default_factory=list)  # overrides of all trials

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise ConfigError(f"sampler={self.sampler}: a study has {', '.join(SAMPLERS)}")
        if not self.space:
            raise ConfigError("a study needs a key to search, as 'optimizer.lr=tag(log,interval(1e-3,1e-2))'")

    def to_json(self) -> dict[str, Any]:
        """Return the content that :meth:`from_json` reads."""
        space = {name: distribution_to_json(parameter) for name, parameter in self.space.items()}
        return {**asdict(self), "space": space}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> StudySpec:
        """Return the definition from the content that :meth:`to_json` has written."""
        space = {name: json_to_distribution(text) for name, text in content["space"].items()}
        objectives = [Objective(**fields) for fields in content["objectives"]]
        return cls(**{**content, "space": space, "objectives": objectives})


@dataclass(frozen=True)
class TrialResult:
    """How a trial has ended."""

    status: str  # finished | target | time | pruned | refused | diverged | out_of_memory | failed
    error: str = ""  # the message of the error that has ended the trial


class Study:
    """A study in its folder. Processes and hosts that share the folder may use it at the same time."""

    def __init__(self, folder: Path, spec: StudySpec | None = None) -> None:
        """Open the study in ``folder``. With ``spec``, create it if the folder has none.

        Raises RunError if the folder has no study, and ConfigError if its study differs from ``spec``.
        """
        if spec is None and not (folder / JOURNAL).is_file():
            raise RunError(f"{folder} holds no study ({JOURNAL} is missing)")
        self.folder = folder
        self._thread_lock = threading.RLock()
        self._claims: dict[int, IO[bytes]] = {}  # the locked files of this process, by the trial
        with self._locked():
            # Every record is written in a context of ``_locked``, so optuna needs no lock of its own.
            lock: Any = self._thread_lock
            self._storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL), lock_obj=lock))
            if spec is None:
                self.optuna, self.spec = self._load()
            else:
                self.optuna, self.spec = self._create(spec), spec

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Return a context in which no other thread, process or host writes the journal. It is not nested.

        - The end of a process releases the lock. optuna's own locks would stay, and the next command would
          wait for 30 s.
        - A killed process may leave an incomplete line in the journal, to which optuna would append the next
          record. The line is removed.
        """
        with self._thread_lock, open_append(self.folder / _LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with open_append(self.folder / JOURNAL) as journal:
                journal.seek(0)
                journal.truncate(journal.read().rfind(b"\n") + 1)
            yield

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

    def claim(self) -> FrozenTrial | None:
        """Return a trial that this process has now claimed, or None if there is none.

        It is an unfinished trial whose process has ended, or else a new trial, and no trial of ``ask``.
        A claim is a lock on a file, so the end of the process also ends its claims.
        """
        with self._locked():
            for trial in self._unfinished(worker=None):
                if self._claim(trial.number):
                    return trial
            new_trial = self._add_trial(worker=None)
            if new_trial is not None:
                self._claim(new_trial.number)
            return new_trial

    def _claim(self, number: int) -> bool:
        """Claim a trial. Return False if this or another process has claimed it."""
        if number in self._claims:
            return False
        file = open_append(self.folder / _CLAIMS / str(number))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._claims[number] = file
        return True

    def release(self, number: int) -> None:
        """Release the claim of a trial. If the trial is unfinished, ``claim`` returns it again."""
        self._claims.pop(number).close()

    def ask(self, worker: str) -> FrozenTrial | None:
        """Return a new trial for a program of the user, or None if the study is full.

        If ``worker`` is not empty and has an unfinished trial, return this trial.
        """
        with self._locked():
            if worker:
                for trial in self._unfinished(worker):
                    return trial
            return self._add_trial(worker)

    def _unfinished(self, worker: str | None) -> list[FrozenTrial]:
        """Return the unfinished trials of a worker. It is None for trials that processes claim."""
        trials = [trial for trial in self.trials() if trial.state == TrialState.RUNNING]
        return [trial for trial in trials if trial.user_attrs[_WORKER] == worker]

    def _add_trial(self, worker: str | None) -> FrozenTrial | None:
        """Store the next trial as one record, and return it. Return None if the study has all its trials."""
        trials = self.trials()
        count = self.spec.n_trials
        if self.spec.sampler == "grid":
            count = min(count, len(grid(self.spec.space)))
        if len(trials) >= count:
            return None
        trial = create_trial(
            state=TrialState.RUNNING,
            params=self._sample(trials),
            distributions=dict(self.spec.space),
            user_attrs={_WORKER: worker},
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
            study.enqueue_trial(self.spec.first[number])
        return study.ask(dict(self.spec.space)).params

    def _open_trial(self, number: int) -> optuna.trial.Trial:
        """Return optuna's object of an unfinished trial. Raises RunError for any other number."""
        trials = self.trials()
        if not 0 <= number < len(trials) or trials[number].state.is_finished():
            raise RunError(f"trial {number} is finished or does not exist")
        study_id = self._storage.get_study_id_from_name(_NAME)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
        return optuna.trial.Trial(self.optuna, trial_id)

    def report(self, number: int, values: Sequence[float]) -> bool:
        """Store the validations of an unfinished trial, and return whether the median rule stops the trial.

        ``values`` has the first objective at each validation so far. Those that are stored already stay. NaN
        is worse than any number.
        """
        worst = self.spec.objectives[0].worst((-math.inf, math.inf))
        with self._locked():
            trial = self._open_trial(number)
            for index in range(len(self.trials()[number].intermediate_values), len(values)):
                trial.report(worst if math.isnan(values[index]) else values[index], index)
            return trial.should_prune()  # The median rule is optuna's default.

    def finish(
        self,
        number: int,
        result: TrialResult,
        values: Sequence[float] | None = None,
        state: TrialState = TrialState.FAIL,
    ) -> None:
        """Store the end of a trial.

        With ``values``, one for each objective, the trial is complete. Otherwise it has the state ``state``.
        Raises RunError if the trial does not exist or is finished.
        """
        with self._locked():
            trial = self._open_trial(number)
            trial.set_user_attr(_OUTCOME, asdict(result))
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
        columns = zip(*[trial.values for trial in self.complete_trials()], strict=True)
        pairs = zip(self.spec.objectives, columns, strict=False)  # There may be no column.
        return [objective.worst(values) for objective, values in pairs] or None

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


def result_of(trial: FrozenTrial) -> TrialResult:
    """Return how a trial has ended. The status of an unfinished trial is ``unfinished``."""
    content = trial.user_attrs.get(_OUTCOME)
    if content is None or not trial.state.is_finished():
        return TrialResult("unfinished")
    return TrialResult(**content)
