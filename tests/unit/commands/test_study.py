from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from speechtrain.commands import study
from speechtrain.errors import ConfigError, RunError
from speechtrain.study.store import Study

SDA = """\
observation_budget: 10
save_path: /home/user/result/
ppn: 2
hosts:
- localhost

model_parameter:
  project: sda
  experiment: rnnt
  parameters:
  - bounds:
      max: 1.0e-2
      min: 1.0e-3
    name: learning_rate
    transformation: log
    type: double
  - bounds:
      max: 10
      min: 1
    name: warmup_epochs
    type: int

metrics:
- name: training_time
  objective: minimize
  threshold: 43200
- name: WER
  objective: minimize
  threshold: 0.25
"""

WORKER = """
import json, subprocess, sys

command = [sys.executable, "-m", "speechtrain", "study"]
ask = [*command, "ask", sys.argv[1]]
while line := subprocess.run(ask, capture_output=True, text=True, check=True).stdout:
    trial = json.loads(line)
    values = {"WER": trial["assignments"]["learning_rate"], "training_time": 3600 * trial["id"]}
    end = {"id": trial["id"], "values": values}
    subprocess.run([*command, "tell", sys.argv[1], json.dumps(end)], check=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sda.yaml").write_text(SDA)
    assert study.run(["import", str(tmp_path / "sda.yaml"), str(tmp_path / "study")]) == 0
    return tmp_path / "study"


def test_import_reads_the_form_of_the_reference_system(folder: Path) -> None:
    spec = Study(folder).spec
    rate, epochs = spec.space["learning_rate"], spec.space["warmup_epochs"]
    assert (rate.low, rate.high, rate.log) == (1e-3, 1e-2, True)
    assert (epochs.low, epochs.high, epochs.log) == (1, 10, False)
    thresholds = [(objective.name, objective.direction, objective.threshold) for objective in spec.objectives]
    assert thresholds == [("training_time", "minimize", 43200), ("WER", "minimize", 0.25)]
    assert spec.n_trials == 10


@pytest.mark.slow
def test_two_programs_share_a_study_of_eight_trials(tmp_path: Path) -> None:
    (tmp_path / "sda.yaml").write_text(SDA.replace("budget: 10", "budget: 8"))
    folder = tmp_path / "study"
    study.run(["import", str(tmp_path / "sda.yaml"), str(folder)])
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, str(folder)]) for _ in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    trials = Study(folder).trials()
    assert [trial.values[0] for trial in trials] == [3600 * number for number in range(8)]


def test_ask_gives_a_worker_its_trial_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    for _ in range(2):
        study.run(["ask", str(folder), "--worker", "a"])
    study.run(["ask", str(folder)])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["id"] for line in lines] == [0, 0, 1]
    assert lines[0] == lines[1]
    assert lines[0]["assignments"].keys() == {"learning_rate", "warmup_epochs"}


def test_tell_refuses_lines_that_are_no_end_of_a_trial(folder: Path) -> None:
    study.run(["ask", str(folder)])
    lines = ["{", "[]", '{"id": 0}', '{"id": "0", "failed": "x"}', '{"id": 0, "values": {"WER": "low"}}']
    lines.append('{"id": 0, "values": {"WER": NaN, "training_time": 1}}')
    for line in lines:
        with pytest.raises(ConfigError, match="a trial is"):
            study.run(["tell", str(folder), line])
    with pytest.raises(ConfigError, match=r"objective training_time: .* has WER"):
        study.run(["tell", str(folder), '{"id": 0, "values": {"WER": 0.3}}'])
    for number in (4, -1):
        with pytest.raises(RunError, match=f"trial {number} is finished or does not exist"):
            study.run(["tell", str(folder), json.dumps({"id": number, "failed": "lost"})])
    study.run(["tell", str(folder), '{"id": 0, "failed": "out of memory"}'])
    assert Study(folder).trials()[0].state.name == "FAIL"


def test_status_shows_values_thresholds_and_causes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(4):
        study.run(["ask", str(folder)])
    ends = [
        {"id": 0, "values": {"WER": 0.2, "training_time": 50000}},
        {"id": 1, "values": {"WER": 0.24, "training_time": 100}},
        {"id": 2, "failed": "the host was lost"},
    ]
    for end in ends:
        study.run(["tell", str(folder), json.dumps(end)])
    capsys.readouterr()
    study.run(["status", str(folder), "--html"])
    lines = capsys.readouterr().out.splitlines()
    assert "beyond training_time" in lines[1]
    assert lines[2].endswith("(best)")
    assert "the host was lost" in lines[3]
    assert "unfinished" in lines[4]
    page = (folder / "study.html").read_text()
    assert "plotly" in page
    assert "<script src=" not in page.lower()
