"""Tests of what a command replaces in a recipe: values of another choice of a group, and validation sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from speechtrain.errors import ConfigError
from speechtrain.start.check_keys import check
from speechtrain.start.command_line import translate_arguments
from speechtrain.start.compose import Composed, compose, compose_with_choices
from speechtrain.start.recipe_needs import needs_of


def composed(*arguments: str, config_dir: str | None = None) -> Composed:
    """Return what a command with these arguments composes for a run on the CPU."""
    return compose_with_choices(translate_arguments(["run_dir=r", *arguments]), config_dir)


def plain(node: DictConfig) -> Any:
    return OmegaConf.to_container(node, resolve=False)


@pytest.mark.parametrize(
    "arguments",
    [
        "recipe=contextnet_dummy final_decoder=none",
        "recipe=contextnet_librispeech tokenizer=characters",
        "recipe=aidk_rnnt decoder=beam",
        "recipe=aidk_rnnt tokenizer=characters",
        "recipe=nemo_quartznet optimizer=sgd",
        "recipe=nemo_quartznet encoder=lstm_small",
        "recipe=nemo_quartznet augment=specaugment",
        "recipe=intel_rnnt model=ctc",
        "recipe=mlperf_2048 encoder=fastconformer_small",
        "recipe=fsdd data=digits",
        "recipe=gaudi_wav2vec2 schedule=cosine",
        "recipe=wav2vec2_fsdd data=manifest data.train=a.tsv",
        "recipe=demo optimizer=sgd schedule=mlperf decoder=beam",
    ],
)
def test_a_typed_choice_takes_the_place_of_a_recipes_choice(
    arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASET_DIR", "corpora")
    recipe, *typed = arguments.split()
    config = composed(recipe, *typed, "device=cpu", "precision=fp32").config
    assert check(config)
    for text in typed:
        group, _, _ = text.partition("=")
        if group in ("optimizer", "schedule", "decoder", "tokenizer", "augment"):
            assert plain(config[group]) == plain(composed(text).config[group]), "the values of its own YAML"


def test_a_line_names_the_values_that_are_replaced() -> None:
    assert composed("recipe=intel_rnnt", "optimizer=lamb").notices == [
        "optimizer=lamb has its own values, which replace optimizer.lr, optimizer.eps, optimizer.form of "
        "recipe=intel_rnnt for optimizer=adamw"
    ]
    assert composed("recipe=intel_rnnt", "optimizer=adamw", "device=cpu").notices == []
    assert composed("recipe=demo", "device=cpu", "optimizer=lamb").notices == []


def test_typed_keys_are_kept_and_checked() -> None:
    config = composed("recipe=intel_rnnt", "optimizer=lamb", "optimizer.lr=0.5", "trainer.clip=2").config
    assert (config.optimizer.lr, config.optimizer.eps, config.trainer.clip) == (0.5, 1e-9, 2.0)
    assert config.schedule.warmup_steps == 8000, "the recipe's schedule stays"
    with pytest.raises(ConfigError, match=r"^optimizer\.form: there is no such key"):
        composed("recipe=intel_rnnt", "optimizer=lamb", "optimizer.form=intel")


def test_a_recipe_of_a_user_is_replaced_in_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    text = "# @package _global_\ndefaults: [intel_rnnt, _self_]\nschedule: {min_lr: 0.1}\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(text)
    config, _, notices = composed("recipe=mine", "schedule=constant", config_dir=str(tmp_path))
    assert plain(config.schedule) == plain(compose(["schedule=constant"]).schedule)
    assert notices == [
        "schedule=constant has its own values, which replace schedule.warmup_steps, "
        "schedule.min_lr of recipe=mine for schedule=intel"
    ]


# --- validation sets --------------------------------------------------------------------------------


def test_typed_validation_sets_replace_those_of_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATASET_DIR", raising=False)
    typed = ["data.valid.clean=a.json", "data.valid.other=b.json", "data.valid.cv=c.json"]
    config, _, notices = composed("recipe=nemo_quartznet", "data.train=t.json", *typed)
    assert config.data.valid == {"clean": "a.json", "other": "b.json", "cv": "c.json"}
    assert notices == ["the sets of this command replace data.valid: dev-clean, dev-other, common_voice"]
    assert needs_of(config) == [], "the replaced sets need no DATASET_DIR"
    config = composed("recipe=nemo_quartznet", "data.valid={clean: a.json}").config
    assert config.data.valid == {"clean": "a.json"}


def test_a_plus_adds_a_set_and_a_key_of_a_set_changes_it() -> None:
    config, _, notices = composed("data=librispeech", "+data.valid.mine=a.json")
    assert [*config.data.valid] == ["dev-clean", "mine"]
    assert notices == []
    config = composed("data=digits", "data.valid.unheard.utterances=2").config
    assert config.data.valid.unheard.utterances == 2
    assert composed("data=digits", "data.valid=a.json").config.data.valid == "a.json"
    assert composed("data=digits", "data.valid={}").config.data.valid.unheard
