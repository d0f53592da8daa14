"""Stored runs evaluate, transcribe and continue as with the version that wrote them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tests.support.golden import BANDS, STEPS

from ..support.digits import write_sample
from .conftest import INLINE, Command

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "old_runs"
RUNS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
MOST_BYTES = 200_000


def expected(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((GOLDEN / name / "expected.json").read_text())
    return content


def later_losses(name: str) -> tuple[int, dict[int, float]]:
    """The last step that a stopped run has in common with the same run undisturbed, and the losses after it.

    A loss is the mean since the line before it, so the first one after the stop is another mean.
    """
    content = expected(name)
    losses = {int(step): loss for step, loss in content["losses"].items()}
    common = content["stopped_at"] + min(losses) - 1
    return common, {step: loss for step, loss in losses.items() if step > common}


@pytest.fixture
def copy_of(command: Callable[..., Command]) -> Callable[..., Command]:
    """``copy_of("0.1.0")``: a copy of the run of a version, under another name."""

    def make(name: str) -> Command:
        run = command("copy-of-a-run")
        shutil.copytree(GOLDEN / name / "run", run.run_dir)
        run.arguments = [f"run_dir={run.run_dir}"]
        return run

    return make


def test_every_file_is_tracked() -> None:
    files = {p for p in GOLDEN.rglob("*") if p.is_file()}
    listed = subprocess.run(
        ["git", "ls-files", "-z", "."], cwd=GOLDEN, capture_output=True, text=True, check=True
    )
    tracked = {GOLDEN / name for name in listed.stdout.split("\0") if name}
    assert files == tracked
    for name in RUNS:
        assert GOLDEN / name / "run" / "config.yaml" in files
    assert sum(p.stat().st_size for p in files) <= MOST_BYTES


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_evaluated_as_then(copy_of: Callable[..., Command], name: str) -> None:
    run = copy_of(name)
    done = run.tool("evaluate", str(run.run_dir), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"] == {
        key: pytest.approx(metrics, rel=1e-4) for key, metrics in expected(name)["evaluation"].items()
    }


@pytest.mark.parametrize("name", RUNS)
def test_a_run_transcribes_as_then(copy_of: Callable[..., Command], tmp_path: Path, name: str) -> None:
    run = copy_of(name)
    sample = tmp_path / "sample.wav"
    write_sample(sample)
    done = run.tool("transcribe", str(run.run_dir), str(sample))
    assert done.returncode == 0, done.stderr
    text = expected(name)["transcript"]
    assert text  # an empty one would be equal to anything that fails
    assert done.stdout == f"{sample}\t{text}\n"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_evaluated_with_any_decoder(copy_of: Callable[..., Command], name: str) -> None:
    run = copy_of(name)
    few = ["decoder=greedy", "decoder.max_symbols_per_step=5", "decoder.max_symbols=1"]
    done = run.tool("evaluate", str(run.run_dir), *few[:2], "--json")
    assert done.returncode == 0, done.stderr
    usual = expected(name)["evaluation"]
    found = json.loads(done.stdout)["metrics"]
    assert {key: metrics["wer"] for key, metrics in found.items()} == {
        key: pytest.approx(metrics["wer"]) for key, metrics in usual.items()
    }
    done = run.tool("evaluate", str(run.run_dir), *few, "--json")
    assert done.returncode == 0, done.stderr
    for key, metrics in json.loads(done.stdout)["metrics"].items():
        assert metrics["cer"] > usual[key]["cer"]
        assert metrics["loss"] == pytest.approx(usual[key]["loss"])


def times_of(run_dir: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in [run_dir, *run_dir.rglob("*")]}


def assert_done(run: Command) -> None:
    """Start a finished run again, which writes nothing."""
    times = times_of(run.run_dir)
    done = run.run()
    assert done.returncode == 0, done.stderr
    assert "is done: finished at step" in done.stdout
    assert times_of(run.run_dir) == times


@pytest.mark.parametrize("name", RUNS)
def test_a_run_continues_as_then_and_is_done(copy_of: Callable[..., Command], name: str) -> None:
    run = copy_of(name)
    told = json.loads((run.run_dir / "run.json").read_text())["overrides"]
    stopped, losses = later_losses(name)
    run.arguments += INLINE
    done = run.run()
    assert done.returncode == 0, done.stderr
    assert run.result()["status"] == "finished"
    found = {step: loss for step, loss in run.losses().items() if step > stopped}
    assert sorted(found) == sorted(losses)
    first, last = BANDS["fp32"]
    band = np.linspace(first, last, STEPS)[: len(found)]
    ratios = [abs(loss / losses[step] - 1) for step, loss in sorted(found.items())]
    np.testing.assert_array_less(ratios, band)
    about = json.loads((run.run_dir / "run.json").read_text())
    assert about["overrides"] == told  # of the first start, whoever continues it
    assert about["latest"]["argv"] == run.arguments
    assert_done(run)


def test_the_same_command_finds_its_run_whatever_the_folder_is_called(
    copy_of: Callable[..., Command],
) -> None:
    run = copy_of(RUNS[-1])
    run.environment = {**run.environment, "OUTPUT_DIR": str(run.run_dir.parent)}
    first = json.loads((run.run_dir / "run.json").read_text())["overrides"]
    run.arguments = [
        *reversed(first[1:]),
        first[0],
        "data.workers=1",
    ]  # in another order, with a key that may change
    refused = run.run()
    assert refused.returncode == 5
    assert f"run_dir={run.run_dir} continues it" in refused.stderr
    same_command, run.arguments = run.arguments, [f"run_dir={run.run_dir}"]
    continued = run.run_inline(f"trainer.max_steps={run.result()['steps'] + 1}")
    assert continued.returncode == 0, continued.stderr
    run.arguments = same_command
    done = run.run()
    assert done.returncode == 0, done.stderr
    assert f"{run.run_dir} is done" in done.stdout
    shutil.copytree(run.run_dir, run.run_dir.with_name("copy"))
    twice = run.run()
    assert twice.returncode == 5
    assert "Choose one with run_dir=DIR" in twice.stderr


def test_a_run_of_an_unknown_format_is_refused_by_every_command(
    copy_of: Callable[..., Command],
) -> None:
    run = copy_of(RUNS[-1])
    config = run.run_dir / "config.yaml"
    content = config.read_text().partition("\n")[2]
    assert content.startswith("format: 3\n")
    config.write_text(content.replace("format: 3", "format: 2", 1))
    for done in (run.run(), run.tool("evaluate", str(run.run_dir))):
        assert done.returncode == 2
        assert f"{config} has format 2, which this version does not read." in done.stderr
        assert done.stderr.count("\n") == 1


def test_what_changes_training_is_refused_by_name(copy_of: Callable[..., Command]) -> None:
    run = copy_of(RUNS[-1])
    for typed, says in {
        "optimizer.lr=0.5": "optimizer.lr: 0.01 in the run, 0.5 now",
        "recipe=fsdd": "recipe=fsdd was not an override when the run started",
        "encoder.hiden=3": "encoder.hiden: the run's config has no such key; did you mean 'encoder.hidden'?",
        "world_size=5": None,
    }.items():
        done = run.run(typed, "dry_run=true")
        if says is None:
            assert done.returncode == 2
            assert "1 micro-batches per update, which world_size=5 does not divide" in done.stderr
        else:
            assert done.returncode in (2, 5)
            assert says in done.stderr
    same = run.run_inline("optimizer.lr=0.01", "encoder.hidden=10", "trainer.max_steps=891")
    assert same.returncode == 0, same.stderr
    assert run.result()["steps"] == 891
    kept = run.run("trainer.max_steps=900")  # with the text of the first start: the stored value wins
    assert "the run keeps its trainer.max_steps=891" in kept.stdout
    assert "is done: finished at step 891" in kept.stdout


def stored_fields(event: dict[str, Any]) -> set[str]:
    """The name and the fields of an event. Two events have names of the environment and of the config."""
    is_open = event["event"] in ("environment", "data")
    return {event["event"]} if is_open else {event["event"], *event}


def names_in(run_dir: Path) -> set[str]:
    """The names that a run's files hold: a layer's number is N."""
    found: set[str] = set()

    def targets(node: Any) -> None:
        if isinstance(node, dict):
            found.update({node["_target_"]} if "_target_" in node else ())
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            targets(child)

    files = [p.relative_to(run_dir) for p in run_dir.rglob("*") if p.is_file()]
    found |= {path.name for path in files if path.parts[0] != "tensorboard"}
    targets(yaml.safe_load((run_dir / "config.yaml").read_text()))
    for path in run_dir.rglob("*.json"):
        found |= json.loads(path.read_text()).keys()
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        found |= stored_fields(json.loads(line))
    for folder in run_dir.glob("checkpoints/step-*"):
        state = torch.load(folder / "state.pt", weights_only=True)
        found |= {key for part in state.values() for key in part} | state.keys()
        optimizer = state["optimizer"]
        found |= {key for part in (*optimizer["state"].values(), *optimizer["param_groups"]) for key in part}
    return {re.sub(r"(?<=\.)\d+(?=\.)|(?<=_l)\d+$|(?<=perplexity_)\d+$", "N", name) for name in found}


def test_every_stored_name_is_listed(command: Callable[..., Command]) -> None:
    root = GOLDEN.parents[2]
    listed = set(re.findall(r"`([^`\n]+)`", (root / "docs" / "stored-names.md").read_text()))
    now = command("now", "trainer.max_steps=2", "tracking=default", "tracking.trackers.console.enabled=false")
    assert now.run_inline().returncode == 0
    for run_dir in [now.run_dir, *(GOLDEN / name / "run" for name in RUNS)]:
        assert names_in(run_dir) <= listed, run_dir
    sources = [p.read_text() for p in (root / "speechtrain").rglob("*.py")]
    variables = {name for text in sources for name in re.findall(r'"(SPEECHTRAIN_[A-Z_]+)"', text)}
    assert variables
    assert variables <= listed
