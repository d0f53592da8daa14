"""Processor time of asking and telling in a study of 500 trials: ``python benchmarks/study.py``."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from speechtrain.study.objectives import Objective
from speechtrain.study.store import Study, StudySpec

TRIALS = 500


def finished_study(folder: Path) -> None:
    """Write a study with ``TRIALS`` finished trials and room for more."""
    space = {"optimizer.lr": FloatDistribution(1e-3, 1e-2, log=True), "warmup": IntDistribution(20, 200)}
    study = Study(folder, StudySpec(space, [Objective("wer")], n_trials=2 * TRIALS))
    for number in range(TRIALS):
        params = {"optimizer.lr": 1e-3 + number * 1e-5, "warmup": 20 + number % 180}
        attributes = {"worker": None}
        trial = create_trial(
            state=TrialState.COMPLETE,
            value=abs(number - 250) / 500,
            params=params,
            distributions=space,
            user_attrs=attributes,
        )
        study.optuna.add_trial(trial)


def processor_seconds(*words: str) -> tuple[float, str]:
    """Return the processor time of a command of its own process, and its output."""
    before = os.times()
    command = [sys.executable, "-m", "speechtrain", "study", *words]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    after = os.times()
    user = after.children_user - before.children_user
    system = after.children_system - before.children_system
    return user + system, output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="commands of each kind (5)")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "study")
        finished_study(folder)
        asks = []
        tells = []
        for _ in range(rounds):
            seconds, output = processor_seconds("ask", str(folder))
            asks.append(seconds)
            end = json.dumps({"id": json.loads(output)["id"], "values": {"wer": 0.3}})
            tells.append(processor_seconds("tell", str(folder), end)[0])
        print(f"{TRIALS} finished trials, median of {rounds}, processor seconds of one process:")
        print(f"ask {statistics.median(asks):.2f}, tell {statistics.median(tells):.2f}")


if __name__ == "__main__":
    main()
