"""The recipes of the reference systems: their fixed numbers, networks, devices and lengths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf

from speechtrain.distributed.world import World
from speechtrain.errors import ConfigError
from speechtrain.rank.build import trainer_config_for
from speechtrain.run_directory import flat
from speechtrain.start.build import build_encoder, build_model
from speechtrain.start.check_keys import check
from speechtrain.start.compose import compose
from speechtrain.start.run_config import part_of, run_config
from speechtrain.text.vocabulary import Characters, NoText, Tokenizer
from tests.support.composed import composed

ROOT = Path(__file__).resolve().parents[3]
RECIPES = ROOT / "conf" / "recipe"
GOLDEN: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "tests/golden/recipes.yaml").read_text())
FOLDERS = {"L": "librispeech", "C": "common_voice", "T": "tedlium3", "S": "switchboard"}
CONTEXTNET = {"librispeech": 12, "common_voice": 4, "tedlium": 24, "switchboard": 14}
DATA = "/mounted"


@pytest.fixture(autouse=True)
def _dataset_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATASET_DIR", DATA)
    monkeypatch.delenv("NUM_STEPS", raising=False)


def recipe(name: str, *overrides: str) -> DictConfig:
    return composed(f"recipe={name}", *overrides)


def with_folders(value: Any) -> Any:
    """A value of the golden table with the folder of each corpus in place of its letter."""
    if isinstance(value, dict):
        return {key: with_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_folders(item) for item in value]
    match = re.match(r"([LCTS])((?:_\w+)?/.+)", value) if isinstance(value, str) else None
    if match is None:
        return value
    return f"{DATA}/manifests/{FOLDERS[match[1]]}{match[2]}"


@pytest.mark.parametrize("name", GOLDEN)
def test_a_recipe_has_the_numbers_of_its_source(name: str) -> None:
    config = recipe(name, "device=cpu")
    values = {}
    for key in GOLDEN[name]:
        value = OmegaConf.select(config, key, throw_on_missing=True)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
        values[key] = value
    assert values == with_folders(GOLDEN[name])


@pytest.mark.parametrize("name", sorted(GOLDEN.keys() - {"mlperf"}))
def test_a_recipe_of_a_reference_system_says_where_it_is_from(name: str) -> None:
    header = (RECIPES / f"{name}.yaml").read_text().partition("defaults:")[0]
    base = (RECIPES / "_contextnet.yaml").read_text().partition("defaults:")[0]
    text = header + base * name.startswith("contextnet_")
    for word in ("Source", "Data", "Hardware", "Expected result"):
        assert f"# {word}: " in text
    assert "ot measured here" in text


@pytest.mark.parametrize(
    ("name", "device", "precision"),
    [
        ("intel_rnnt", "CPU", "FP32"),
        ("aidk_rnnt", "CPU", "FP32"),
        ("gaudi_wav2vec2", "HPU", "BF16"),
        ("nemo_quartznet", "CUDA", "FP16"),
        ("contextnet_dummy", "CUDA", "FP16"),
        *((f"contextnet_{name}", "CUDA", "FP16") for name in CONTEXTNET),
    ],
)
def test_a_recipe_sets_its_device(name: str, device: str, precision: str) -> None:
    config = recipe(name)
    assert config.device._target_.endswith(f".{device}")
    assert config.precision._target_.endswith(f".{precision}")
    check(recipe(name, "device=cpu", "precision=fp32", "run_dir=run"))


def tokenizer(labels: int) -> Tokenizer:
    """A tokenizer with a number of labels."""
    alphabet = "".join(map(chr, range(0x4E00, 0x4E00 + labels)))
    return Characters(alphabet) if labels else NoText()


def size(config: DictConfig, labels: int) -> int:
    """The parameters of a recipe's model with a number of labels, on the meta device."""
    with torch.device("meta"):
        task = build_model(run_config(config), tokenizer(labels), build_encoder(run_config(config)))
    return sum(parameter.numel() for parameter in task.parameters())


@pytest.mark.parametrize(
    ("name", "labels", "parameters"),
    [
        ("intel_rnnt", 28, 47_985_693),
        ("aidk_rnnt", 1023, 21_001_216),
        ("contextnet_dummy", 1024, 190_225),
        ("mlperf_2048", 1023, 49_006_080 + 16 * 4 * 1024),  # 16 padded features
        ("gaudi_wav2vec2", 0, 95_044_608),
    ],
)
def test_the_networks_have_the_published_sizes(name: str, labels: int, parameters: int) -> None:
    assert size(recipe(name, "device=cpu"), labels) == parameters


def test_contextnet_large_fits_eight_recordings_in_24_gib() -> None:
    """The prediction is within a factor of two of what autograd stores, so it counts twice."""
    config = recipe("contextnet_librispeech", "device=cpu")
    assert (config.data.batch.count, config.data.max_seconds) == (8, 20.0)
    with torch.device("meta"):
        task = build_model(run_config(config), tokenizer(1024), build_encoder(run_config(config)))
    activations = 2 * task.footprint().bytes(rows=8, seconds=20.0, labels=200)
    weights_and_gradients = 8 * sum(parameter.numel() for parameter in task.parameters())
    assert activations + weights_and_gradients < 24 * 2**30


@pytest.mark.parametrize("corpus", CONTEXTNET)
def test_a_normaliser_is_that_of_the_corpus(corpus: str) -> None:
    config = recipe(f"contextnet_{corpus}")
    folder = Path(config.tokenizer.model).parent.name
    text = (ROOT / f"conf/corpus/{folder}.yaml").read_text()
    assert config.tokenizer.normaliser == yaml.safe_load(text)["normaliser"]


def accumulate(config: DictConfig) -> int:
    """Return the micro-batches that each rank of a run accumulates."""
    return trainer_config_for(run_config(config), World(0, config.world_size)).accumulate


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_intels_batch_is_64_for_each_number_of_ranks(ranks: int) -> None:
    config = recipe("intel_rnnt", f"world_size={ranks}", "run_dir=run")
    check(config)
    assert ranks * accumulate(config) * config.data.batch.count == 64
    with pytest.raises(ConfigError, match="not a multiple of world_size=3"):
        check(recipe("intel_rnnt", "world_size=3", "run_dir=run"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("steps", [None, 100, 500])
def test_intels_precisions_and_step_limit(
    precision: str, steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if steps:
        monkeypatch.setenv("NUM_STEPS", str(steps))
    config = recipe("intel_rnnt", f"precision={precision}")
    assert config.precision._target_ == f"speechtrain.precision.{precision.upper()}"
    assert config.trainer.max_steps == steps
    check(recipe("intel_rnnt", f"precision={precision}", "run_dir=run"))


GAUDI_DIFFERENCES = {
    "encoder.layer_drop": (0.05, 0.0),
    "encoder.normalise_audio": (False, True),
    "data.shapes": (8, 7),  # device=hpu sets 8
    "data.batch.count": (None, 16),
    "optimizer.form": ("torch", "fairseq"),
    "trainer.save_every": (None, 25000),
    "trainer.keep": (2, 1),
    "trainer.validate_every": (5000, None),
}


def test_the_header_of_gaudi_lists_each_difference_from_wav2vec2() -> None:
    common = recipe("wav2vec2", "device=hpu", "data.train=FILE")
    pairs = [
        flat(OmegaConf.to_container(config, resolve=True)) for config in (common, recipe("gaudi_wav2vec2"))
    ]
    differences = {}
    for key in pairs[0].keys() | pairs[1].keys():
        values = (pairs[0].get(key), pairs[1].get(key))
        if values[0] != values[1] and not re.match(r"tracking\.|data\.(train|valid|hold_out)\b", key):
            differences[key] = values
    assert differences == GAUDI_DIFFERENCES
    header = (RECIPES / "gaudi_wav2vec2.yaml").read_text().partition("defaults:")[0]
    for key in GAUDI_DIFFERENCES:
        assert key in header or (key == "trainer.keep" and ", keep " in header)
    assert "data.hold_out " in header
    assert "device=hpu, precision=bf16 " in header


@pytest.mark.parametrize(("cards", "micro_batches"), [(1, 64), (8, 8), (16, 4), (32, 2)])
def test_gaudi_accumulates_to_64(cards: int, micro_batches: int) -> None:
    config = recipe("gaudi_wav2vec2", f"world_size={cards}", "run_dir=run")
    check(config)
    assert accumulate(config) == micro_batches


UTTERANCES = {
    # 28,539 + 104,014 + 148,688 lines of the transcripts at openslr.org/12
    "librispeech": 281_241,
    # buckets.train of "en" in datasets/cv-corpus-9.0-2022-04-27.json of common-voice/cv-dataset
    "common_voice": 890_116,
    # segments of the training set of release 3, as catalogues of data sets list them; not counted here
    "tedlium": 268_263,
    # segments with words of the Mississippi State transcripts, as in RWTH's recipe for Switchboard
    "switchboard": 249_624,
}
UPDATES = {"librispeech": 421_862, "common_voice": 445_058, "tedlium": 804_789, "switchboard": 436_842}


def test_contextnet_recipes_have_about_400_000_updates() -> None:
    """The source chose the epochs for about 400,000 updates. The difference is reported, not corrected."""
    updates = {}
    for corpus, utterances in UTTERANCES.items():
        config = recipe(f"contextnet_{corpus}", "device=cpu")
        assert config.trainer.max_epochs == CONTEXTNET[corpus]
        updates[corpus] = round(config.trainer.max_epochs * utterances / config.data.batch.count)
        schedule = part_of(config, "schedule").build(steps_per_epoch=1, planned_steps=updates[corpus])
        assert schedule.rate(2001) == pytest.approx(1e-4)
        assert schedule.rate(updates[corpus] + 1) == 0.0
        print(f"{corpus}: {updates[corpus]:,} updates, {updates[corpus] - 400_000:+,} to 400,000")
    assert updates == UPDATES


@pytest.mark.parametrize("name", ["mlperf", "nemo_quartznet"])
def test_compose_refuses_a_mapping_of_sets_in_place_of_a_list(name: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.train: the config has a list here\. Write one, such as"):
        compose([f"recipe={name}", "data.train={a: {path: a.jsonl, weight: 3}}"])
    config = compose([f"recipe={name}", "data.train=[{path: a.jsonl, weight: 3}, b.jsonl]"])
    assert config.data.train == [{"path": "a.jsonl", "weight": 3}, "b.jsonl"]
