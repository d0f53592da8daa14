"""The parts of a rank from its config: initial weights, planned updates, and its share of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speechtrain.devices.cpu import CPU
from speechtrain.distributed.world import World
from speechtrain.errors import ConfigError, MachineError
from speechtrain.optim.schedules import Schedule
from speechtrain.rank import build
from speechtrain.rank.build import build_task, load_initial_weights, plan_updates, trainer_config_for
from speechtrain.start.build import build_data
from speechtrain.start.compose import compose
from speechtrain.start.run_config import run_config
from speechtrain.text.vocabulary import SentencePiece, train_sentencepiece
from speechtrain.tracking.console import start_lines
from speechtrain.trainer_config import TrainerConfig
from tests.support.composed import composed
from tests.support.tiny_run import TINY, untrained

OF_THE_VOCABULARY = {"prediction.embedding.weight"} | {
    f"{layer}.{kind}" for layer in ("joint.output", "ctc") for kind in ("weight", "bias")
}


def test_a_world_that_the_run_does_not_have_is_refused() -> None:
    config = compose(["trainer.simulate_world=6"])
    assert trainer_config_for(run_config(config), World()).accumulate == 6
    with pytest.raises(MachineError, match="WORLD_SIZE=2 in the environment, but the run has world_size=1"):
        trainer_config_for(run_config(config), World(0, 2))
    config.world_size = 4
    with pytest.raises(ConfigError, match="is not a multiple of world_size=4"):
        trainer_config_for(run_config(config), World(0, 4))


ALPHABET = "tokenizer.alphabet=' abcdefgh'"
TDT = ("model.joint.durations=[0,1,2]", "decoder@final_decoder=none")


@pytest.mark.parametrize(
    "part", [".", "checkpoints/step-00000001", "checkpoints/step-00000001/model.safetensors"]
)
def test_an_alphabet_within_the_old_one_keeps_its_rows(tmp_path: Path, part: str) -> None:
    run = untrained(tmp_path / "run", *TINY, ALPHABET, "seed=7")
    (run / "checkpoints/step-00000001/state.safetensors").unlink()  # it holds nothing that init_from reads
    before = load_file(run / "checkpoints/step-00000001/model.safetensors")
    config = compose([*TINY, "tokenizer.alphabet='hca '", f"init_from={run / part}"])
    task, tokenizer = build_task(run_config(config))
    (line,) = start_lines(load_initial_weights(run_config(config), task, tokenizer))
    assert line.endswith("labels kept 4 of 4")
    rows = [8, 3, 1, 0, 9]  # of h, c, a, the space and the blank
    for name, value in task.state_dict().items():
        if name == "prediction.embedding.weight":  # The blank has no embedding here.
            assert value.equal(before[name][rows[:-1]])
        elif name in OF_THE_VOCABULARY:
            assert value.equal(before[name][rows]), name
        else:
            assert value.equal(before[name]), name


@pytest.mark.parametrize(
    ("overrides", "rest"),
    [
        (("model.prediction.start=blank",), {"ctc": 1, "joint.output": 1, "prediction.embedding": 1}),
        (("model=ctc",), {"output": 1}),
        (TDT, {"ctc": 1, "joint.output": 4, "prediction.embedding": 0}),
        (("prediction=stateless", *TDT), {"ctc": 1, "joint.output": 4, "prediction.embedding": 0}),
    ],
    ids=["rnnt", "ctc", "tdt", "stateless"],
)
def test_a_new_label_gets_fresh_rows_beside_those_that_stay(
    tmp_path: Path, overrides: tuple[str, ...], rest: dict[str, int]
) -> None:
    """``rest`` is the number of rows that follow those of the labels: the blank and the durations."""
    keys = [key for key in TINY if "model=ctc" not in overrides or not key.startswith("model.")]
    run = untrained(tmp_path / "run", *keys, *overrides, ALPHABET, "seed=7")
    before = load_file(run / "checkpoints/step-00000001/model.safetensors")
    config = compose([*keys, *overrides, "tokenizer.alphabet='xhaä '", f"init_from={run}"])
    task, tokenizer = build_task(run_config(config))
    fresh = {name: value.clone() for name, value in task.state_dict().items()}
    facts = load_initial_weights(run_config(config), task, tokenizer)
    assert facts["labels kept"] == "3 of 5 (fresh: 'x' 'ä')"
    assert facts["fresh"] == 0
    for layer, count in rest.items():
        value, old = task.state_dict()[f"{layer}.weight"], before[f"{layer}.weight"]
        kept = old[[8, 1, 0, *range(9, 9 + count)]]
        assert value[[1, 2, 4, *range(5, 5 + count)]].equal(kept), layer
        assert value[[0, 3]].equal(fresh[f"{layer}.weight"][[0, 3]]), layer
        assert len(value) == 5 + count


def test_durations_that_the_old_model_lacks_are_fresh(tmp_path: Path) -> None:
    run = untrained(tmp_path / "run", *TINY, ALPHABET, "seed=7")
    before = load_file(run / "checkpoints/step-00000001/model.safetensors")["joint.output.bias"]
    config = compose([*TINY, *TDT, "tokenizer.alphabet='ab'", f"init_from={run}"])
    task, tokenizer = build_task(run_config(config))
    fresh = task.state_dict()["joint.output.bias"].clone()
    load_initial_weights(run_config(config), task, tokenizer)
    assert task.state_dict()["joint.output.bias"].equal(torch.cat([before[[1, 2, 9]], fresh[3:]]))


def test_pieces_keep_their_rows_by_their_name(tmp_path: Path) -> None:
    texts = {"old": ["one two three four"] * 3, "new": ["one two ten six"] * 3}
    labels, keys = {}, {}
    for name, lines in texts.items():
        train_sentencepiece(lines, tmp_path / f"{name}.model", "bpe", size=16)
        labels[name] = SentencePiece(tmp_path / f"{name}.model").labels
        keys[name] = [*TINY, "tokenizer=sentencepiece", f"tokenizer.model={tmp_path / name}.model"]
    run = untrained(tmp_path / "run", *keys["old"], "seed=7")
    before = load_file(run / "checkpoints/step-00000001/model.safetensors")["ctc.weight"]
    config = compose([*keys["new"], f"init_from={run}"])
    task, tokenizer = build_task(run_config(config))
    facts = load_initial_weights(run_config(config), task, tokenizer)
    shared = [label for label in labels["new"] if label in labels["old"]]
    assert "<unk>" in shared
    assert 2 < len(shared) < len(labels["new"])
    assert facts["labels kept"].startswith(f"{len(shared)} of {len(labels['new'])} (fresh: ")
    for label in shared:
        row = task.state_dict()["ctc.weight"][labels["new"].index(label)]
        assert row.equal(before[labels["old"].index(label)]), label


def test_the_scores_of_shared_labels_stay_until_the_first_update(tmp_path: Path) -> None:
    run = untrained(tmp_path / "run", *TINY, ALPHABET, "seed=7")
    encoded = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))
    scores = []
    for alphabet, text in ((" abcdefgh", "cab"), ("cbaü", "cab")):
        config = compose([*TINY, f"tokenizer.alphabet='{alphabet}'", f"init_from={run}"])
        task, tokenizer = build_task(run_config(config))
        load_initial_weights(run_config(config), task, tokenizer)
        task.eval()
        predicted = task.joint.prediction(task.prediction(torch.tensor([tokenizer.encode(text)])))
        logits = task.joint(task.joint.encoder(encoded)[:, :, None], predicted[:, None])
        shared = [*tokenizer.encode("abc"), tokenizer.blank]
        scores.append((logits[..., shared], task.ctc(encoded)[..., shared]))
    (old_joint, old_ctc), (new_joint, new_ctc) = scores
    torch.testing.assert_close(new_joint, old_joint, rtol=0, atol=0)
    torch.testing.assert_close(new_ctc, old_ctc, rtol=0, atol=0)


def test_weights_of_the_same_vocabulary_are_taken_over_and_not_of_one_that_is_unknown(tmp_path: Path) -> None:
    run = untrained(tmp_path / "run", *TINY, ALPHABET, "seed=7")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text("another: program's")
    bare = tmp_path / "checkpoints/bare.safetensors"
    shutil.copy(run / "checkpoints/step-00000001/model.safetensors", bare)
    before = load_file(bare)
    for start, lost in ((run, set[str]()), (bare, OF_THE_VOCABULARY)):
        config = compose([*TINY, ALPHABET, "tokenizer.normaliser=none", f"init_from={start}"])
        task, tokenizer = build_task(run_config(config))
        facts = load_initial_weights(run_config(config), task, tokenizer)
        assert (facts["tensors taken over"], facts["fresh"]) == (len(before) - len(lost), len(lost))
        expected = f"0 of 9 (the labels of {bare} are unknown)" if lost else None
        assert facts.get("labels kept") == expected
        kept = {name: value for name, value in task.state_dict().items() if name not in lost}
        assert all(value.equal(before[name]) for name, value in kept.items())


def planned(*overrides: str) -> tuple[Schedule, int | None]:
    """The plan of a run on the embedded corpus."""
    config = composed("data.workers=0", *overrides)
    run = run_config(config)
    return plan_updates(run, run.trainer, build_data(run, run.tokenizer.build()))


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
