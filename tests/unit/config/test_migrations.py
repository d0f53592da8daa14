"""Configs and weights of earlier releases, one format number at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from speechtrain.checkpoint.migrations import migrate_2_to_3, migrate_names
from speechtrain.commands._load_run import own_config
from speechtrain.config.build import build_encoder, build_model, build_tokenizer
from speechtrain.config.migrations import FORMAT, migrate
from speechtrain.errors import ConfigError

OLD_RUNS = Path(__file__).resolve().parents[2] / "golden" / "old_runs"


def of_format_2(**parts: Any) -> dict[str, Any]:
    return migrate({"format": 2, **parts}, "config.yaml")


def test_keys_that_selected_kernels_are_gone() -> None:
    found = of_format_2(
        device={"_target_": "d", "lstm": "loop", "threads": 2},
        encoder={"_target_": "e", "conv_form": "conv2d", "attention": "slices", "width": 4},
    )
    assert found["device"] == {"_target_": "d", "threads": 2}
    assert found["encoder"] == {"_target_": "e", "width": 4}
    features = {"_target_": "f", "fourier": "fft", "block_frames": 0, "mels": 3}
    found = of_format_2(encoder={"_target_": "e", "features": features})
    assert found["encoder"]["features"] == {"_target_": "f", "mels": 3}


def test_a_transducer_gets_nodes_and_its_decoder() -> None:
    model = {
        "_target_": "speechtrain.models.rnnt.RNNT", "prediction_hidden": 7, "prediction_norm": True,
        "init_scale": 0.5, "joint_hidden": 9, "joint_bias": "single", "fastemit": 0.1,
        "max_symbols_per_step": 3, "max_symbols": None,
    }  # fmt: skip
    found = of_format_2(model=model)
    assert found["model"] == {
        "_target_": "speechtrain.models.rnnt.RNNT",
        "fastemit": 0.1,
        "prediction": {
            "_target_": "speechtrain.nn.prediction.LSTMPrediction",
            "hidden": 7,
            "layer_norm": True,
            "init_scale": 0.5,
        },
        "joint": {"_target_": "speechtrain.nn.joint.Joint", "hidden": 9, "bias": "single"},
    }
    greedy = {"_target_": "speechtrain.decoding.greedy.Greedy", "max_symbols_per_step": 3}
    assert found["decoder"] == {**greedy, "max_symbols": None}
    assert found["final_decoder"] == {"_target_": "speechtrain.decoding.base.NoDecoder"}


@pytest.mark.parametrize(
    ("model", "decoder"), [("ctc.CTC", "greedy.Greedy"), ("wav2vec2.Wav2Vec2", "base.NoDecoder")]
)
def test_other_models_get_theirs(model: str, decoder: str) -> None:
    found = of_format_2(model={"_target_": f"speechtrain.models.{model}"})
    assert found["decoder"] == {"_target_": f"speechtrain.decoding.{decoder}"}


def test_the_present_format_is_left_alone() -> None:
    present = {"device": {"_target_": "d", "lstm": "mine"}}
    assert migrate({"format": FORMAT, **present}, "config.yaml") == present
    with pytest.raises(ConfigError, match=r"c\.yaml: format 99 is not 1 to"):
        migrate({"format": 99}, "c.yaml")


# --- weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rnnt", "rnnt_two_ranks", "ctc", "wav2vec2"])
def test_the_order_of_parameters_is_that_of_the_old_run(name: str) -> None:
    """An optimizer's state is kept by the parameter's number, so the order is a stored name, too."""
    folder = OLD_RUNS / name / "interrupted"
    config = own_config(folder)
    with torch.device("meta"):
        task = build_model(config, build_tokenizer(config), build_encoder(config))
    (checkpoint,) = sorted((folder / "checkpoints").glob("step-*"))[-1:]
    saved = torch.load(checkpoint / "state.pt", weights_only=True)
    assert [migrate_2_to_3(old) for old in saved["task"]] == list(task.state_dict())
    assert (list(saved["task"]) == list(task.state_dict())) == (name in ("ctc", "wav2vec2"))
    shapes = [tuple(value.shape) for value in task.parameters()]
    states = saved["optimizer"]["state"]
    assert [tuple(states[number]["exp_avg"].shape) for number in sorted(states)] == shapes


def test_a_name_that_the_model_has_is_not_renamed() -> None:
    saved = {"joint_net.weight": 1, "joint_enc.weight": 2, "own": 3}
    known = {"joint_net.weight", "joint.encoder.weight", "own"}
    assert migrate_names(saved, known) == {"joint_net.weight": 1, "joint.encoder.weight": 2, "own": 3}
