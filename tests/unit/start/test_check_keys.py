"""The config's own rules: resume fields, what is written, what fits an annotation, allowed classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf

from speechtrain.devices.cpu import CPU
from speechtrain.errors import ConfigError, RunError, nearest
from speechtrain.run_directory import flat
from speechtrain.start.build import build_data, build_encoder
from speechtrain.start.changeable_keys import may_change
from speechtrain.start.check_keys import check, mismatch
from speechtrain.start.compose import compose
from speechtrain.start.resolved import dump, load, resolve, with_absolute_paths
from speechtrain.start.run_config import part_of, run_config
from speechtrain.start.run_name import fingerprint
from speechtrain.start.targets import ALLOW_TARGETS, target_class
from speechtrain.text.vocabulary import Characters
from tests.support.composed import composed


@pytest.fixture
def config() -> DictConfig:
    return composed("model=rnnt_small", "run_dir=/tmp/somewhere")


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "annotation", "fits"),
    [
        (1, int, True),
        (True, int, False),
        (1.0, int, False),
        ("1", int, False),
        (1, float, True),
        (1.5, float, True),
        (True, float, False),
        (10**400, float, False),
        (float("nan"), float, False),
        (float("inf"), float | None, False),
        (False, bool, True),
        (0, bool, False),
        ("", str, True),
        (None, str, False),
        (None, str | None, True),
        ("a", int | None, False),
        ([1, 2.5], list[float], True),
        ([1, "b"], list[float], False),
        ("ab", list[str], False),
        ([], list[int], True),
        ([1, "a"], tuple[int, str], True),
        (["a", 1], tuple[int, str], False),
        ({"a": 1}, dict[str, int], True),
        ([1], dict[str, int], False),
        ({"_target_": "speechtrain.devices.cpu.CPU"}, CPU, True),
        ({"_target_": "speechtrain.devices.cuda.CUDA"}, CPU, False),
        ({"a": 1}, CPU, False),
        (3, CPU, False),
        (3, CPU | None, False),
        (None, CPU | None, True),
        (object(), Any, True),
        ("a", str | list[str], True),
        (["a"], str | list[str], True),
        ([1], str | list[str], False),
    ],
)
def test_mismatch(value: Any, annotation: Any, fits: bool) -> None:
    problem = mismatch(value, annotation)
    assert (problem == "") == fits, problem


def test_a_union_names_the_item_that_does_not_fit() -> None:
    assert mismatch([True], list[str] | None) == "item 1: True is not a string, quote it"
    parts = dict[str, CPU | None] | list[CPU]
    assert mismatch({"a": "text"}, parts) == "a: 'text' is not a CPU or null"
    assert mismatch({"a": 1}, str | list[str]) == "{'a': 1} is not a string or a list"


# --- classes --------------------------------------------------------------------------------------


def test_classes_of_the_project_and_optimizers_of_torch() -> None:
    assert target_class("speechtrain.devices.cpu.CPU", "device") is CPU
    for name in ("AdamW", "Adafactor", "Muon"):
        if hasattr(torch.optim, name):  # Muon is new in torch 2.9.
            assert target_class(f"torch.optim.{name}", "optimizer").__name__ == name


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "subprocess.Popen",
        "torch.nn.Linear",
        "torch.optim.optimizer.torch.os.system",
        "torch.optim.optimizer.torch.nn.Linear",
        "torch.optim.lr_scheduler.StepLR",
        "speechtrain.errors.nearest",
        "speechtrain.run_directory.subprocess.Popen",
        "speechtrain.run_directory.Path",
        "speechtrain",
        "CPU",
        "",
        "speechtrain..CPU",
        "speechtrain.devices.cpu.CPU()",
        "speechtrainer.Model",
    ],
)
def test_classes_from_elsewhere_are_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="_target_"):
        target_class(target, "model")


def test_a_refused_module_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing a module runs it."""
    (tmp_path / "stranger.py").write_text("open('ran', 'w').close()\n\n\nclass Model:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"or to load\(RUN, .allow_targets=stranger.\) in Python"):
        target_class("stranger.Model", "model")
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv(ALLOW_TARGETS, "stranger")
    assert target_class("stranger.Model", "model").__name__ == "Model"
    assert (tmp_path / "ran").exists()


def test_building_refuses_as_the_check_does() -> None:
    with pytest.raises(ConfigError, match=r"subprocess"):
        part_of(
            OmegaConf.create({"model": {"_target_": "subprocess.Popen", "args": ["true"]}}), "model"
        ).build()
    node = {"_target_": "speechtrain.models.ctc.CTC", "inner": [{"_target_": "os.system"}]}
    with pytest.raises(ConfigError, match=r"model\.inner"):
        part_of(OmegaConf.create({"model": node}), "model").build()


# --- the check ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model.hiden", 3, "model.hiden: RNNT takes no 'hiden'"),
        ("model.joint.hiden", 3, "did you mean 'hidden'"),
        ("encoder.features.mels", "x", "encoder.features.mels: 'x' is not an integer"),
        ("encoder.features", None, "encoder.features"),
        ("model.tokenizer", "x", "model.tokenizer: RNNT takes no 'tokenizer'"),
        ("trainer.max_stps", 3, "did you mean 'trainer.max_steps'"),
        ("sead", 3, "did you mean 'seed'"),
        ("trainer.accumulate", 0, "trainer.accumulate=0"),
        ("resume", "no", "auto, never or must"),
        ("trainer.shard", "layers", "trainer.shard=layers: choose none or parameters"),
        ("device", None, "device=NAME"),
        ("precision", {"_target_": "speechtrain.devices.cpu.CPU"}, "CPU does not implement Precision"),
        ("tokenizer", {"_target_": "speechtrain.text.vocabulary.SentencePiece"}, "needs 'model'"),
    ],
)
def test_check_names_the_key(config: DictConfig, key: str, value: Any, said: str) -> None:
    OmegaConf.set_struct(config, False)
    OmegaConf.update(config, key, value, merge=False, force_add=True)
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_simulated_worlds(config: DictConfig) -> None:
    config.trainer.simulate_world = 64
    check(config)
    config.world_size = 5
    with pytest.raises(ConfigError, match="is not a multiple of"):
        check(config)
    config.world_size, config.trainer.accumulate = 2, 4
    with pytest.raises(ConfigError, match="disagree"):
        check(config)
    config.trainer.accumulate = 32
    check(config)


def resume_fields(*overrides: str) -> dict[str, Any]:
    """The keys and values that a resume may not change."""
    found = flat(resolve(composed(*overrides)))
    return {key: value for key, value in found.items() if not may_change(key)}


# --- what a resume may change, and what is written -------------------------------------------------


@pytest.mark.parametrize(
    "override",
    [
        "world_size=4",
        "run_dir=/tmp/x",
        "resume=must",
        "dry_run=true",
        "tracking=none",
        "device.threads=3",
        "trainer.max_steps=3",
        "trainer.target=0.1",
        "trainer.keep=9",
        "data.workers=3",
        "launcher=torchrun",
        "launcher.one.inline=true",
    ],
)
def test_what_a_resume_may_change(override: str) -> None:
    assert fingerprint([], {}) == fingerprint([override], {})
    assert resume_fields() == resume_fields(override)


@pytest.mark.parametrize(
    "override",
    [
        "seed=2",
        "model=rnnt_mlperf",
        "precision=bf16",
        "optimizer.lr=0.1",
        "trainer.ema=0.5",
        "trainer.clip=2",
        "data.train.utterances=9",
        "encoder.dropout=0.2",
        "data.batch.count=3",
        "schedule=mlperf",
    ],
)
def test_what_makes_another_run(override: str) -> None:
    assert resume_fields() != resume_fields(override)
    assert fingerprint([], {}) != fingerprint([override], {})


def test_the_file_reads_back(config: DictConfig, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump(config))
    assert resolve(load(path)) == resolve(config)
    assert "${" not in path.read_text().replace("${oc.env:", "")


def test_each_bit_of_a_stored_config_is_guarded(config: DictConfig, tmp_path: Path) -> None:
    """A changed digit is another valid value: only a digest tells it from the run's own."""
    path, sound = tmp_path / "config.yaml", dump(config)
    content = sound.encode()
    for place in range(3, 8 * len(content), 8 * 31 + 3):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            assert resolve(load(path)) == resolve(config)  # the mark of the digest itself
            assert place // 8 < len("# sha256 of what follows: ")
        except (ConfigError, RunError):
            pass
    path.write_text(sound.replace("seed: 1", "seed: 3", 1))
    with pytest.raises((ConfigError, RunError), match="does not match the sha256 in its first line"):
        load(path)
    path.write_text(sound.replace("seed: 1", "seed: 3", 1).partition("\n")[2])
    assert load(path).seed == 3  # as who edits it is told


def test_values_of_the_environment_stay_out_of_the_file(
    config: DictConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    config.data.cache = "${oc.env:TOKEN}/cache"
    config.tokenizer.alphabet = "${data.cache}"  # resolved: a copy would leak
    text = dump(config)
    assert yaml.safe_load(text)["data"]["cache"] == "${oc.env:TOKEN}/cache"
    assert resolve(config)["data"]["cache"] == "secret/cache"
    assert "secret" not in text


TOKEN = "${oc.env:TOKEN}"
SPELLINGS = {
    **dict.fromkeys(
        ("${ oc.env:TOKEN}", "${oc.env :TOKEN}", "${oc.env\t: TOKEN }", "${oc.env:'TOKEN'}"), TOKEN
    ),
    "${oc.${tokenizer.normaliser}:TOKEN}": TOKEN,
    "${oc.create:{a: '\\${oc.env:TOKEN}'}}": {"a": TOKEN},
    "${data.cache}": f"x{TOKEN}",
    "a${oc.env:NONE,b}${seed}": "a${oc.env:NONE,'b'}1",
    "${oc.env:NONE,null}": "${oc.env:NONE,null}",
}
"""Spellings of a value from the environment, and how a run stores it."""
DERIVED = ["${oc.decode:${oc.env:NUMBER}}", "a${oc.env:NONE,${oc.env:TOKEN}}", '${oc.env:NONE,"it\'s"}']
DERIVED += ["${oc.select:${oc.env:KEY}}", "${length:${oc.env:TOKEN}}", "\\${seed}"]


def configured(config: DictConfig, text: str) -> DictConfig:
    config = OmegaConf.create(OmegaConf.to_container(config, resolve=False))
    config.data.cache = "x${ oc.env :TOKEN}"
    config.trainer.target = "${oc.env: TOKEN}"
    config.tokenizer.normaliser = "env"
    config.tokenizer.alphabet = text
    config.model.names = ["a", text, {"b": text}]
    return config


@pytest.mark.parametrize("text", SPELLINGS)
def test_a_secret_stays_out_however_it_is_spelt(
    text: str, config: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    config = configured(config, text)
    stored = yaml.safe_load(dump(config))
    assert "secret" not in json.dumps(stored)
    assert stored["tokenizer"]["alphabet"] == SPELLINGS[text]
    assert stored["model"]["names"] == ["a", SPELLINGS[text], {"b": SPELLINGS[text]}]
    assert resolve(config)["data"]["cache"] == "xsecret"  # OmegaConf's own resolver is back


@pytest.mark.parametrize("text", DERIVED)
def test_what_is_derived_from_the_environment_is_not_stored(
    text: str, config: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TOKEN": "secret", "NUMBER": "4", "KEY": "seed"}.items():
        monkeypatch.setenv(name, value)
    OmegaConf.register_new_resolver("length", len, replace=True)
    with pytest.raises(ConfigError, match=r"model\.names: a run stores values and \$\{oc\.env:NAME"):
        dump(configured(config, text))


def test_with_absolute_paths_makes_each_path_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATASET_DIR", raising=False)
    (tmp_path / "one, two.jsonl").write_text("")
    own = [
        "data=manifest",
        "data.train=[a.jsonl,'one, two.jsonl']",
        "+data.valid.dev=x/../b.jsonl",
        "+data.valid.table={path: t.csv, text: said}",
        "init_from=w",
    ]
    digits = "{_target_: speechtrain.data.corpora.digits.Digits, split: valid, root: words}"
    config = with_absolute_paths(compose([*own, f"+data.valid.two={digits}", "data.cache=/c/../cache"]))
    assert config.data.train == [f"{tmp_path}/a.jsonl", f"{tmp_path}/one, two.jsonl"]
    assert config.data.valid.dev == f"{tmp_path}/b.jsonl"
    assert config.data.valid.table == {"path": f"{tmp_path}/t.csv", "text": "said"}
    config.run_dir = "r"
    check(config)
    assert (config.data.valid.two.root, config.data.valid.two.split) == (f"{tmp_path}/words", "valid")
    assert (config.data.cache, config.init_from) == ("/cache", f"{tmp_path}/w")
    config = with_absolute_paths(compose(["data=fsdd"]))
    assert resolve(config)["data"]["valid"]["test"]["root"] == f"{tmp_path}/fsdd"
    assert f"${{oc.env:DATASET_DIR,'{tmp_path}/fsdd'}}" in dump(config)  # the environment still decides
    (tmp_path / "far" / "in").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "in")
    (tmp_path / "far" / "c.jsonl").write_text("")
    config = with_absolute_paths(compose(["data=manifest", "data.train=link/../c.jsonl"]))
    assert Path(config.data.train).read_text() == ""  # not the file of that name in this folder


def test_a_file_that_cannot_be_read_is_named(config: DictConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load(tmp_path / "none.yaml")
    half = dump(config)[: len(dump(config)) // 2].rpartition("\n")[0]
    for text in (
        "a: [",
        "format: 3\nnonsense: 1\n",
        "format: 3\ntrainer:\n  max_steps: abc\n",
        "- 1\n",
        "",
        "\0",
        half,
    ):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(RunError, match=r"config\.yaml is damaged \(.*\)\. Delete it, and the command "):
            load(tmp_path / "config.yaml")


# --- the default parts, and who names its own ------------------------------------------------------


def plan(*overrides: str) -> dict[str, Any]:
    """What decides how long and how a run trains: every part and key of a training plan."""
    plain = resolve(composed(*overrides))
    return {key: plain[key] for key in ("trainer", "augment", "optimizer", "schedule")}


def test_model_rnnt_is_the_small_network_under_two_names() -> None:
    assert resolve(compose(["model=rnnt"])) == resolve(compose(["model=rnnt_small"])) == resolve(compose([]))
    assert compose(["model=rnnt_mlperf"]).encoder.hidden == 1024


def test_the_plan_of_the_digits_is_not_that_of_other_data() -> None:
    digits, own = plan(), plan("data=manifest", "data.train=a.jsonl")
    assert (digits["trainer"]["max_epochs"], own["trainer"]["max_epochs"]) == (1.5, 100.0)
    assert (digits["trainer"]["ema"], own["trainer"]["ema"]) == (0.99, 0.999)
    assert (digits["augment"]["freq_masks"], own["augment"]["freq_masks"]) == (0, 2)
    assert plan("augment=none")["augment"]["warp"] == 0.0  # what is typed wins
    assert plan("augment=specaugment")["augment"]["freq_masks"] == 2
    assert plan("recipe=demo") == digits


@pytest.mark.parametrize(
    "choice",
    [
        *(
            "recipe=fsdd",
            "recipe=mlperf",
            "recipe=finetune",
            "recipe=scratch",
            "recipe=wav2vec2",
            "recipe=wav2vec2_fsdd",
        ),
        *("model=wav2vec2", "model=wav2vec2_small", "model=wav2vec2_large"),
    ],
)
def test_a_choice_that_has_a_plan_takes_none_from_the_data(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASET_DIR", "fsdd")
    needs = ["tokenizer=characters"] if choice == "recipe=mlperf" else []
    on_digits, on_own = (
        plan(choice, *needs, f"data={data}", *more)
        for data, more in (("digits", []), ("manifest", ["data.train=a.jsonl"]))
    )
    assert on_digits == on_own


def test_gaudi_trains_in_bf16_unless_a_precision_is_typed() -> None:
    name = "speechtrain.precision."
    assert compose(["device=hpu"]).precision._target_ == f"{name}BF16"
    assert compose(["device=hpu", "precision=fp32"]).precision._target_ == f"{name}FP32"
    assert compose([]).precision._target_ == f"{name}FP32"


def test_nearest_is_a_name_alike_or_what_others_call_it() -> None:
    known = [
        "world_size",
        "data.train.utterances",
        "trainer.keep",
        "optimizer.lr",
        "optimizer.amsgrad",
        "data.batch.count",
    ]
    for name, near in {
        "data.train.utterances": "",
        "trainer.devices": "world_size",
        "trainer.nonsense": "",
        "optimizer.learning_rate": "optimizer.lr",
        "batch_size": "data.batch.count",
        "trainer.kep": "trainer.keep",
        "trainr.keep": "trainer.keep",
        "trainr.width": "",
    }.items():
        assert nearest(name, known) == (f"; did you mean {near!r}?" if near else ""), name


@pytest.mark.parametrize(
    "overrides",
    [
        "encoder.pre_layers=100000000",
        "data.valid.unheard.utterances=1000000000",
        f"encoder.hidden={10**400}",
    ],
)
def test_check_refuses_counts_beyond_all_memory(overrides: str) -> None:
    config = compose(["run_dir=x", overrides])
    with pytest.raises(ConfigError, match="it must be at most"):
        check(config)


def test_build_refuses_a_class_that_the_parameter_excludes() -> None:
    config = composed("run_dir=x")
    config.data.valid = {"x": {"_target_": "speechtrain.rank.StopRequest"}}
    with pytest.raises(ConfigError, match=r"data\.valid"):
        build_data(run_config(config), Characters())
    config = composed("run_dir=x")
    config.encoder.features = {"_target_": "speechtrain.features.augment.Augment"}
    with pytest.raises(ConfigError, match=r"encoder\.features"):
        build_encoder(run_config(config))
