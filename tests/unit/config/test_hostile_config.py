"""A config.yaml made by somebody else: refused in one line, within seconds, before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from speechtrain.config import resolved
from speechtrain.config.build import build_data, build_encoder, build_tokenizer, dry_build
from speechtrain.config.check import check
from speechtrain.errors import ConfigError, RunError
from speechtrain.report.run import read_run
from speechtrain.runs.compose import compose
from speechtrain.text.vocabulary import Characters
from tests.support.composed import composed

LAUGHS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 10)}]\n" for i in range(10))
MERGES = "".join(
    f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' if i else f'k{j}: 1' for j in range(10))}}}\n"
    for i in range(10)
)
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 300))
TEXTS = [LAUGHS, MERGES, CHAIN, "a: &a [*a]", "a: " + "[" * 100_000, "a: " + "{b: " * 500 + "1" + "}" * 500]
TEXTS += [
    "a: " + "b" * 2**20,
    "a: '" + "${b}" * 20_000 + "'",
    "[1, 2]",
    "text",
    "a: \0",
    "",
    "format: 3\nseed: 1e999",
]
TEXTS += ["format: 3\ntrainer: {target: 1" + "0" * 400 + "}"]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_text_that_is_no_small_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(RunError, match="is damaged"):
        resolved.load(tmp_path / "config.yaml")
    assert len(read_run(tmp_path).config) <= 2  # of a report, which shows a damaged run too


REFERENCES = ["${model.b}", "${no.such.resolver:x}", "${hydra:runtime.cwd}", "${oc.create:x}", "${run_dir}"]
REFERENCES += ["${oc.env:${seed}}", "${oc.env:A,${seed}}", "${oc.decode:${oc.env:A}}", "${ oc.env:A}", "${"]
REFERENCES += ["${oc.env:A,'${seed}'}", "${oc.e${oc.env:A}nv:A}", "$${oc.env:A}{seed}", "${oc.env:A,\\'}"]


@cache
def stored_text() -> str:
    return resolved.dump(composed("run_dir=x"))


@pytest.mark.parametrize("text", REFERENCES)
@pytest.mark.parametrize("kind", [str, lambda text: [text], lambda text: {text: 1}])
def test_a_stored_config_refers_to_the_environment_only(
    tmp_path: Path, text: str, kind: Callable[[str], Any]
) -> None:
    content = yaml.safe_load(stored_text())
    content["model"]["a"] = kind(text)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content, width=10**6))
    with pytest.raises(RunError, match="refers to more than"):
        resolved.load(tmp_path / "config.yaml")
    assert not read_run(tmp_path).config


def test_a_stored_config_may_refer_to_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A", "b")
    content = yaml.safe_load(resolved.dump(composed("run_dir=x")))
    texts = [
        "${oc.env:A}",
        "x/${oc.env:A}/${oc.env:A,c}",
        "${oc.env:NONE,null}",
        "${oc.env:NONE,'/a b{c'}",
        "$x",
    ]
    content["model"]["a"] = texts
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content, width=10**6))
    assert list(resolved.load(tmp_path / "config.yaml").model.a) == ["b", "x/b/b", None, "/a b{c", "$x"]


@pytest.mark.parametrize(
    "overrides",
    [
        "encoder.pre_layers=100000000",
        "model.prediction.layers=10000000",
        "encoder.features.n_fft=1099511627776",
        "encoder.features.mels=100000000",
        "data.sample_rate=1000000000000",
        "data.valid.unheard.utterances=1000000000",
        "device.threads=1000000000",
        f"encoder.hidden={10**400}",
    ],
)
def test_counts_that_would_take_all_memory(overrides: str) -> None:
    config = compose(["run_dir=x", overrides])
    with pytest.raises(ConfigError, match="it must be at most"):
        check(config)


def test_a_network_that_no_machine_can_hold() -> None:
    with pytest.raises(ConfigError, match="encoder"):
        dry_build(compose(["run_dir=x", f"encoder.hidden={2**62}"]))


def test_a_class_is_built_only_where_its_parameter_admits_it() -> None:
    config = composed("run_dir=x")
    config.data.valid = {"x": {"_target_": "speechtrain.train_rank.StopRequest"}}
    with pytest.raises(ConfigError, match=r"data\.valid"):
        build_data(config, Characters())
    config = composed("run_dir=x")
    config.encoder.features = {"_target_": "speechtrain.features.augment.Augment"}
    with pytest.raises(ConfigError, match=r"encoder\.features"):
        build_encoder(config)


@pytest.mark.parametrize("node", [None, [1], "cpu", {"_target_": "speechtrain.train_rank.StopRequest"}])
def test_a_part_that_is_none(node: Any) -> None:
    config = composed("run_dir=x")
    config.tokenizer = node
    with pytest.raises(ConfigError, match="tokenizer"):
        build_tokenizer(config)


def test_a_long_alphabet_is_checked_at_once() -> None:
    with pytest.raises(ConfigError, match="repeats 'a'"):
        Characters("a" * 10**6)
