"""Tests of the keys that follow from the training data, of ``recipe=scratch`` and of ``recipe=finetune``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from speechtrain.devices import host
from speechtrain.devices.cpu import CPU
from speechtrain.errors import ConfigError, DataError, RunError
from speechtrain.rank.build import build_task, load_initial_weights
from speechtrain.start import sizing
from speechtrain.start.check_keys import check
from speechtrain.start.compose import compose
from speechtrain.start.from_data import explicit_keys, follow_data, rare_characters
from speechtrain.start.run_config import part_of, run_config
from speechtrain.start.sizing import Speech, frame, hold_out, scratch
from tests.support.composed import composed
from tests.support.tiny_run import untrained


def keys_from_data(from_data: str) -> set[str]:
    """Return the keys that ``follow_data`` has set. ``from_data`` is the text that it has stored."""
    return {word.partition("=")[0] for word in from_data.split() if "=" in word}


def speech(**values: Any) -> Speech:
    """Return a training set of four hours, except for ``values``."""
    return Speech(
        **{"recordings": 4616, "hours": 4.0, "labels_per_second": 14.0, "core_hours": 1.0, **values}
    )


def test_the_frame_follows_from_the_labels() -> None:
    assert frame(14.0) == (15, 2)  # 30 ms: at 40 the loss fell slower, at 60 CTC could not align
    assert frame(12.0) == (10, 4)
    assert frame(4.0) == (10, 8)
    assert frame(40.0) == (10, 2)
    assert frame(1000.0) == (10, 2)


def test_the_network_follows_from_hours_and_time() -> None:
    assert scratch(speech())["encoder.width"] == 128
    assert scratch(speech(hours=100.0, core_hours=10.0))["encoder.width"] == 128
    assert scratch(speech(hours=100.0, core_hours=2400.0))["encoder.width"] == 176
    assert scratch(speech(hours=1000.0, core_hours=20_000.0))["encoder.width"] == 256


@pytest.mark.parametrize(("hours", "millions"), [(4.0, 1.3), (100.0, 12), (1000.0, 26.6)])
def test_every_network_can_be_built(hours: float, millions: float) -> None:
    config = compose(["recipe=scratch", "data.train=x", "tokenizer.alphabet=abc"])
    for key, value in scratch(speech(hours=hours, core_hours=20.0 * hours)).items():
        OmegaConf.update(config, key, value)
    with torch.device("meta"):
        encoder = part_of(config, "encoder").build(augment=part_of(config, "augment").build())
    assert encoder.frames(16_000) == 33
    assert sum(p.numel() for p in encoder.parameters()) == pytest.approx(millions * 1e6, rel=0.1)


def ranks_of(settings: dict[str, Any]) -> tuple[int, int, int]:
    return settings["world_size"], settings["data.batch.ranks"], settings["data.batch.count"]


def test_the_ranks_follow_from_the_cores_and_the_batch() -> None:
    assert ranks_of(scratch(speech())) == (1, 1, 16)
    assert ranks_of(scratch(speech(rank_cores=2))) == (2, 2, 8)
    assert ranks_of(scratch(speech(rank_cores=3))) == (2, 2, 8)
    assert ranks_of(scratch(speech(rank_cores=64))) == (2, 2, 8)
    assert ranks_of(scratch(speech(rank_cores=64, recordings=20_000))) == (4, 4, 8)
    assert ranks_of(scratch(speech(rank_cores=64, recordings=200))) == (1, 1, 8)


def test_the_held_out_share_falls_with_the_hours() -> None:
    assert hold_out(speech()) == 0.05
    assert hold_out(speech(recordings=10, hours=0.01)) == 0.1
    assert hold_out(speech(hours=1000.0)) == 0.0005


@pytest.mark.parametrize("table", sizing.TABLES)
def test_every_key_of_a_table_exists_in_its_recipe(table: str) -> None:
    config = compose([f"recipe={table}", "data.train=x"])
    for key in sizing.TABLES[table](speech()):
        node: Any = config
        for part in key.split("."):
            assert part in node, key
            node = node[part]


def test_finetuning_masks_and_freezes_a_pretrained_transformer() -> None:
    settings = sizing.finetune(speech(hours=10.0, width=768))
    assert (settings["model.freeze_encoder_steps"], settings["optimizer.lr"]) == (0.1, 1e-4)
    assert settings["encoder.mask"]["probability"] == 0.65
    assert settings["encoder.channel_mask"]["length"] == 64
    settings = sizing.finetune(speech(hours=0.01, width=192))
    assert settings["encoder.mask"] is settings["encoder.channel_mask"] is None
    assert settings["optimizer.lr"] == 1e-3
    assert not {"encoder.mask", "model.freeze_encoder_steps"} & sizing.finetune(speech()).keys()


def test_finetuning_needs_initial_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="add init_from=RUN"):
        config_from_data("recipe=finetune", "data.train=x")
    with pytest.raises(DataError, match="nowhere does not exist"):
        config_from_data("recipe=finetune", "data.train=x", f"init_from={tmp_path}/nowhere")


RECOGNISER = ["recipe=demo", "encoder.hidden=24", "model.joint.hidden=20", "tokenizer.alphabet=' abcdef'"]
PRETRAINING = ["model=wav2vec2_small", "data=digits", "encoder.width=96"]


def test_finetuned_copies_the_parts_of_init_from(tmp_path: Path) -> None:
    recogniser = untrained(tmp_path / "recogniser", *RECOGNISER)
    config = compose(["recipe=finetune", f"init_from={recogniser}", "encoder.dropout=0.3"])
    assert (config.encoder.hidden, config.encoder.dropout, config.model.joint.hidden) == (24, 0.3, 20)
    assert config.tokenizer.alphabet == " abcdef"
    checkpoint = next((recogniser / "checkpoints").glob("step-*"))
    assert compose(["recipe=finetune", f"init_from={checkpoint}"]).encoder.hidden == 24
    config = compose(["recipe=finetune", f"init_from={recogniser}", "model=ctc", "tokenizer=auto"])
    assert (config.encoder.hidden, config.model._target_[-4:]) == (24, ".CTC")
    pretrained = untrained(tmp_path / "pretrained", *PRETRAINING)
    config = compose(["recipe=finetune", f"init_from='{pretrained}'"])
    assert (config.encoder.width, config.model._target_[-4:], config.tokenizer.alphabet) == (96, ".CTC", None)
    # Without init_from, the choice has the defaults, and not the values of the last command.
    assert compose(["recipe=finetune"]).encoder.width == 768


def test_labels_of_the_same_name_are_kept(tmp_path: Path) -> None:
    run = untrained(tmp_path / "run", *RECOGNISER)
    weights = next((run / "checkpoints").glob("step-*/model.safetensors"))
    without_run = tmp_path / "alone.safetensors"
    without_run.write_bytes(weights.read_bytes())

    def labels_kept(source: Path, *overrides: str) -> str | None:
        config = compose([*RECOGNISER, f"init_from={source}", *overrides])
        return load_initial_weights(run_config(config), *build_task(run_config(config))).get("labels kept")

    assert labels_kept(run) is None
    assert labels_kept(run, "tokenizer.alphabet=' abcdü'") == "5 of 6 (fresh: 'ü')"
    assert labels_kept(without_run) == f"0 of 7 (the labels of {without_run} are unknown)"
    with pytest.raises(ConfigError, match=r"joint\.\S+ is \(20.*here \(set the keys below model\."):
        labels_kept(run, "model.joint.hidden=24")
    with pytest.raises(ConfigError, match=r"joint\.\S+ is \(20.*here \(set the keys below model\."):
        labels_kept(run, "model.joint.hidden=24", "tokenizer.alphabet=' abcdü'")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("stolen: ${oc.env:SPEECHTRAIN_TEST_SECRET}", "it reads the environment"),
        (
            "stolen: ['${oc.decode:${oc.env:SPEECHTRAIN_TEST_SECRET,x}}']",
            "it reads the environment|refers to more than",
        ),
        ("stolen: ${seed_of}\nseed_of: ${oc.env:SPEECHTRAIN_TEST_SECRET}", "refers to more than"),
        ("defaults: [/device: lazy]", "'defaults', which would choose other parts"),
    ],
)
def test_init_from_reads_no_environment_for_a_strangers_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: str
) -> None:
    monkeypatch.setenv("SPEECHTRAIN_TEST_SECRET", "hush")
    run = untrained(tmp_path / "run", *RECOGNISER)
    _, _, text = (run / "config.yaml").read_text().partition("\n")
    own, _, root = line.partition("\n")
    (run / "config.yaml").write_text(text.replace("encoder:\n", f"{root}\nencoder:\n  {own}\n", 1))
    with pytest.raises((ConfigError, RunError), match=words if not root else "."):
        compose(["recipe=finetune", f"init_from={run}"])
    (run / "encoder").mkdir()
    (run / "config.yaml").unlink()
    (run / "encoder/imported.yaml").write_text(f"{own}\n")
    with pytest.raises(ConfigError, match=words if not root else "."):
        compose(["recipe=finetune", f"init_from={run}"])
    assert OmegaConf.create({"a": "${oc.env:SPEECHTRAIN_TEST_SECRET}"}).a == "hush"  # for all other configs


def test_rare_characters_skip_at_most_the_allowed_utterances() -> None:
    occurrences = Counter({"a": 10**6, "b": 40, "x": 1, "y": 2})
    utterances = Counter({"a": 5000, "b": 30, "x": 1, "y": 2})
    assert rare_characters(occurrences, utterances, max_skipped=5.0) == ["x", "y"]
    assert rare_characters(occurrences, utterances, max_skipped=2.0) == ["x"]
    assert rare_characters(occurrences, utterances, max_skipped=0.0) == []
    occurrences = Counter({"a": 10**7, "b": 40})
    utterances = Counter({"a": 10**5, "b": 30})
    assert rare_characters(occurrences, utterances, max_skipped=100.0) == ["b"]  # below 1 in 100,000


def write_manifest(folder: Path, texts: list[str], name: str = "train.jsonl", seconds: float = 2.0) -> str:
    """Write a manifest with these transcripts and return its path. The recordings do not exist."""
    records = [
        {"audio_filepath": f"{number}.wav", "duration": seconds, "text": text}
        for number, text in enumerate(texts)
    ]
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder / name)


def config_from_data(*overrides: str, user_files: dict[str, str] | None = None) -> DictConfig:
    """Return the config of a new run after ``follow_data``."""
    config = composed(*overrides, "run_dir=/nowhere")
    check(config)
    follow_data(config, explicit_keys(overrides, user_files or {}))
    check(config)
    return config


@pytest.mark.usefixtures("cache")
def test_the_alphabet_has_the_characters_of_the_transcripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["E\u0301te\u0301, ñandú!", "mbώngω yé"] * 1500 + ["ÿ"]
    train = write_manifest(tmp_path, texts)
    config = config_from_data("data=manifest", f"data.train={train}", "tokenizer=auto")
    assert config.tokenizer.alphabet == "".join(sorted(" abdgmntyéñúωώ"))
    assert "1 rare characters have no label, 1 recordings are skipped: 'ÿ' (1)" in capsys.readouterr().out
    assert keys_from_data(config.from_data) == {"tokenizer"}
    assert config.encoder.hidden == 256


@pytest.mark.usefixtures("cache")
def test_a_large_set_has_sentencepiece_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "_PIECES", ((0.5, 17),))
    train = write_manifest(tmp_path, ["one two three four", "seven eight nine zero"] * 1000)
    one, two = (config_from_data("data=manifest", f"data.train={train}", "tokenizer=auto") for _ in range(2))
    assert one.tokenizer == two.tokenizer
    tokenizer = part_of(one, "tokenizer").build()
    assert (tokenizer.size, tokenizer.normalise("ONE, Two!")) == (18, "one two")
    monkeypatch.setattr(sizing, "_PIECES", ((0.5, 500),))
    assert "alphabet" in config_from_data("data=manifest", f"data.train={train}", "tokenizer=auto").tokenizer
    characters = config_from_data(
        "data=manifest", f"data.train={write_manifest(tmp_path, ['ab'] * 9, 'b.jsonl')}", "tokenizer=auto"
    )
    assert characters.tokenizer.alphabet == "ab"


@pytest.mark.usefixtures("cache")
def test_explicit_keys_are_not_changed(tmp_path: Path) -> None:
    train = write_manifest(tmp_path, ["a quick brown fox jumps over it all"] * 50)
    base = ["recipe=scratch", f"data.train={train}"]
    config = config_from_data(*base)
    assert config.encoder.features.hop_seconds == 0.01
    assert (config.encoder.subsampling, config.data.batch.count) == (2, 4)
    config = config_from_data(*base, "encoder.subsampling=8", "optimizer=lamb", "data.batch.count=7")
    assert (config.encoder.subsampling, config.data.batch.count, config.optimizer.lr) == (8, 7, 4e-3)
    assert not keys_from_data(config.from_data) & {"encoder.subsampling", "optimizer.lr", "data.batch.count"}
    config = config_from_data(*base, "encoder=lstm_small")
    assert (config.encoder.features.splice, config.encoder.stack_time) == (3, 2)  # the frame of lstm_small
    assert not {key for key in keys_from_data(config.from_data) if key.startswith("encoder.")}
    config = config_from_data(*base, "model=ctc", "encoder=wav2vec2_small", "tokenizer=characters")
    assert config.encoder.width == 192
    assert config.tokenizer.alphabet.startswith(" abc")
    user_files = {"recipe/mine": "# @package _global_\nencoder:\n  hidden: 64\n", "optimizer/my": "lr: 1.0\n"}
    assert explicit_keys(["data=manifest"], user_files) == {"encoder.hidden", "optimizer.lr"}


@pytest.mark.usefixtures("cache")
def test_follow_data_chooses_ranks_unless_a_key_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CPU, "rank_cores", lambda self: 2)
    base = ["recipe=scratch", "device=cpu", f"data.train={write_manifest(tmp_path, ['a fox'] * 1000)}"]
    config = config_from_data(*base)
    assert (config.world_size, config.data.batch.ranks, config.data.batch.count) == (2, 2, 8)
    for override in (
        *("world_size=1", "data.batch.count=16", "data.batch.seconds=40", "device.threads=2"),
        *("trainer.accumulate=2", "launcher=local", "launcher=slurm"),
    ):
        config = config_from_data(*base, override)
        assert (config.world_size, config.data.batch.ranks, config.data.batch.count) == (1, 1, 16), override


@pytest.mark.usefixtures("cache")
def test_max_seconds_follows_from_the_data_and_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "free_memory", lambda: 2**40)
    train = write_manifest(tmp_path, ["a quick brown fox"] * 9, seconds=34.5)
    base = ["recipe=scratch", "device=cpu", f"data.train={train}"]
    config = config_from_data(*base)
    assert config.data.max_seconds == 35.0
    assert "9 recordings, 0.09 h" in config.from_data
    assert "data.max_seconds=35.0" in config.from_data
    short = write_manifest(tmp_path, ["a quick brown fox"] * 9, "short.jsonl", seconds=3.0)
    unchanged = config_from_data("recipe=scratch", f"data.train={short}")
    assert (unchanged.data.max_seconds, "data.max_seconds" in unchanged.from_data) == (20.0, False)
    assert config_from_data(*base, "data.max_seconds=50").data.max_seconds == 50.0
    long = write_manifest(tmp_path, ["a quick brown fox"] * 9, "long.jsonl", seconds=90.0)
    with pytest.raises(DataError, match=r"none of 9 recordings is between 0\.1 and 60 s long"):
        config_from_data("recipe=scratch", f"data.train={long}")
    monkeypatch.setattr(host, "free_memory", lambda: 3 * 2**27)
    assert 20.0 < config_from_data(*base).data.max_seconds < 35.0


@pytest.mark.usefixtures("cache")
def test_transcripts_that_the_normaliser_empties_are_named(tmp_path: Path) -> None:
    train = write_manifest(tmp_path, ["?!…"] * 5)
    with pytest.raises(DataError, match=r"normaliser=unicode leaves nothing .*, such as '\?!…'"):
        config_from_data("recipe=scratch", f"data.train={train}")
    config = config_from_data("recipe=scratch", f"data.train={train}", "tokenizer.normaliser=none")
    assert config.tokenizer.alphabet == "!?…"


@pytest.mark.usefixtures("cache")
def test_max_seconds_beyond_the_memory_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "free_memory", lambda: 2**33)
    train = write_manifest(tmp_path, ["a quick brown fox " * 200] * 9, seconds=400.0)
    base = ["recipe=scratch", "device=cpu", f"data.train={train}"]
    assert config_from_data(*base, "data.max_seconds=600").data.max_seconds == 600.0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert "a batch of the longest recordings (400 s) needs about " in line
    assert "% of the free memory. Lower data.max_seconds. Long texts need timestamps" in line
    monkeypatch.setattr(host, "free_memory", lambda: 2**50)
    config_from_data(*base, "data.max_seconds=600")
    assert "warning" not in capsys.readouterr().err
