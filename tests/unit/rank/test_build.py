"""The parts of a rank from its config: initial weights, planned updates, and its share of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from safetensors.torch import load_file

from speechtrain.config.build import build_data, build_tokenizer
from speechtrain.devices.cpu import CPU
from speechtrain.errors import ConfigError, MachineError
from speechtrain.launcher import World
from speechtrain.optim.schedules import Schedule
from speechtrain.rank import build
from speechtrain.rank.build import build_task, load_initial_weights, plan_updates, trainer_config_for
from speechtrain.runs.compose import compose
from speechtrain.tracking.console import start_lines
from speechtrain.trainer_config import TrainerConfig
from tests.support.composed import composed
from tests.support.tiny_run import TINY, untrained

FORWARD, BACKWARD = (f"tokenizer.alphabet='{letters}'" for letters in ("abcdefgh ", " hgfedcba"))
OF_THE_VOCABULARY = {"prediction.embedding.weight"} | {
    f"{layer}.{kind}" for layer in ("joint.output", "ctc") for kind in ("weight", "bias")
}


def test_a_world_that_the_run_does_not_have_is_refused() -> None:
    config = OmegaConf.create({"world_size": 1, "trainer": {"simulate_world": 6}})
    assert trainer_config_for(config, World()).accumulate == 6
    with pytest.raises(MachineError, match="WORLD_SIZE=2 in the environment, but the run has world_size=1"):
        trainer_config_for(config, World(0, 2))
    config.world_size = 4
    with pytest.raises(ConfigError, match="is not a multiple of world_size=4"):
        trainer_config_for(config, World(0, 4))


@pytest.mark.parametrize(
    "part", [".", "checkpoints/step-00000001", "checkpoints/step-00000001/model.safetensors"]
)
def test_weights_of_another_vocabulary_are_not_taken_over(tmp_path: Path, part: str) -> None:
    run = untrained(tmp_path / "run", *TINY, FORWARD, "seed=7")
    (run / "checkpoints/step-00000001/state.pt").unlink()  # it holds nothing that init_from reads
    before = load_file(run / "checkpoints/step-00000001/model.safetensors")
    config = compose([*TINY, BACKWARD, f"init_from={run / part}"])
    task, tokenizer = build_task(config)
    fresh = {name: value.clone() for name, value in task.state_dict().items()}
    (line,) = start_lines(load_initial_weights(config, task, tokenizer))
    assert all(name in line for name in OF_THE_VOCABULARY), line
    for name, value in task.state_dict().items():
        assert value.equal(fresh[name] if name in OF_THE_VOCABULARY else before[name]), name


def test_weights_of_the_same_vocabulary_are_taken_over_and_not_of_one_that_is_unknown(tmp_path: Path) -> None:
    run = untrained(tmp_path / "run", *TINY, FORWARD, "seed=7")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text("another: program's")
    bare = tmp_path / "checkpoints/bare.safetensors"
    shutil.copy(run / "checkpoints/step-00000001/model.safetensors", bare)
    before = load_file(bare)
    for start, lost in ((run, set[str]()), (bare, OF_THE_VOCABULARY)):
        config = compose([*TINY, FORWARD, "tokenizer.normaliser=none", f"init_from={start}"])
        task, tokenizer = build_task(config)
        told = load_initial_weights(config, task, tokenizer)
        assert (told["tensors taken over"], told["fresh"]) == (len(before) - len(lost), len(lost))
        assert set(told.get("fresh for another vocabulary", "").split(", ")) - {""} == lost
        kept = {name: value for name, value in task.state_dict().items() if name not in lost}
        assert all(value.equal(before[name]) for name, value in kept.items())


def planned(*overrides: str) -> tuple[Schedule, int | None]:
    """The plan of a run on the embedded corpus."""
    config = composed("data.workers=0", *overrides)
    return plan_updates(config, TrainerConfig(**config.trainer), build_data(config, build_tokenizer(config)))


def test_a_plan_that_cannot_do_its_work_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    assert planned()[1] == 375
    assert not caplog.messages
    planned("~data.valid.unheard")
    planned("trainer.max_steps=20", "schedule.warmup_steps=20")
    planned("trainer.max_steps=20", "schedule.warmup_steps=2", "schedule.steps=15")
    nothing, warmup, end = caplog.messages
    assert nothing.startswith("data.valid is empty: nothing chooses the best checkpoint")
    assert warmup.startswith("the warm-up takes 20 of 20 updates")
    assert end.startswith("schedule.steps=15: the last 5 of 20 updates have the learning rate of its end")


@pytest.mark.parametrize(("limit", "timeout"), [(60.0, 1860.0), (7200.0, 7260.0)])
def test_a_rank_may_wait_for_half_an_hour_before_the_first_step(
    limit: float, timeout: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank may read data or compile for longer than a step may take."""
    timeouts: list[float] = []
    monkeypatch.setattr(build, "open_group", lambda world, facts, timeout: timeouts.append(timeout))
    build.open_ranks(TrainerConfig(timeout_seconds=limit), World(0, 2, 0, 2), CPU(), tmp_path)
    assert timeouts == [timeout]
