"""What a config takes from its training data: labels, sizes, frames; what is typed wins."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from speechtrain.commands import train
from speechtrain.commands._cli import exit_code_of
from speechtrain.config.build import build, build_tokenizer
from speechtrain.config.check import check
from speechtrain.devices import host
from speechtrain.errors import ConfigError, DataError, RunError
from speechtrain.rank.build import build_task, load_initial_weights
from speechtrain.runs import sizing
from speechtrain.runs.compose import compose
from speechtrain.runs.from_data import explicit_keys, follow_data, rare_characters
from speechtrain.runs.sizing import Speech, frame, hold_out, scratch
from tests.support.composed import composed
from tests.support.tiny_run import untrained


def keys_from_data(from_data: str) -> set[str]:
    """The keys that ``follow_data`` has set, by the text that it leaves in ``from_data``."""
    return {word.partition("=")[0] for word in from_data.split() if "=" in word}


def speech(**values: Any) -> Speech:
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
        encoder = build(config, "encoder", augment=build(config, "augment"))
    assert encoder.frames(16_000) == 33
    assert sum(p.numel() for p in encoder.parameters()) == pytest.approx(millions * 1e6, rel=0.1)


def test_specaugment_follows_from_the_epochs() -> None:
    """In 10 epochs of four hours, masks cost more than they gave."""
    assert speech().epochs == pytest.approx(10.0)
    assert scratch(speech())["augment.freq_masks"] == scratch(speech())["augment.time_masks"] == 0
    assert scratch(speech(hours=1.0))["augment.freq_masks"] == 2


def test_the_share_that_is_held_out_falls_with_the_hours() -> None:
    assert hold_out(speech()) == 0.05
    assert hold_out(speech(recordings=10, hours=0.01)) == 0.1
    assert hold_out(speech(hours=1000.0)) == 0.0005


@pytest.mark.parametrize("table", sizing.TABLES)
def test_every_key_of_a_table_is_one_of_its_recipe(table: str) -> None:
    config = compose([f"recipe={table}", "data.train=x"])
    for key in sizing.TABLES[table](speech()):
        node: Any = config
        for part in key.split("."):
            assert part in node, key
            node = node[part]


def test_finetuning_masks_and_freezes_what_was_pretrained() -> None:
    found = sizing.finetune(speech(hours=10.0, width=768))
    assert (found["model.freeze_encoder_steps"], found["optimizer.lr"]) == (0.1, 1e-4)
    assert (found["encoder.mask"]["probability"], found["encoder.channel_mask"]["length"]) == (0.65, 64)
    few = sizing.finetune(speech(hours=0.01, width=192))
    assert (few["encoder.mask"], few["encoder.channel_mask"], few["optimizer.lr"]) == (None, None, 1e-3)
    assert not {"encoder.mask", "model.freeze_encoder_steps"} & sizing.finetune(speech()).keys()


def test_finetuning_needs_a_beginning(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="add init_from=RUN"):
        followed("recipe=finetune", "data.train=x")
    with pytest.raises(DataError, match="nowhere does not exist"):
        followed("recipe=finetune", "data.train=x", f"init_from={tmp_path}/nowhere")


RECOGNISER = ["recipe=demo", "encoder.hidden=24", "model.joint.hidden=20", "tokenizer.alphabet=' abcdef'"]
PRETRAINING = ["model=wav2vec2_small", "data=digits", "encoder.width=96"]


def test_model_encoder_and_tokenizer_are_those_of_the_beginning(tmp_path: Path) -> None:
    recogniser = untrained(tmp_path / "recogniser", *RECOGNISER)
    begun = compose(["recipe=finetune", f"init_from={recogniser}", "encoder.dropout=0.3"])
    assert (begun.encoder.hidden, begun.encoder.dropout, begun.model.joint.hidden) == (24, 0.3, 20)
    assert begun.tokenizer.alphabet == " abcdef"
    checkpoint = next((recogniser / "checkpoints").glob("step-*"))
    assert compose(["recipe=finetune", f"init_from={checkpoint}"]).encoder.hidden == 24
    other = compose(["recipe=finetune", f"init_from={recogniser}", "model=ctc", "tokenizer=auto"])
    assert (other.encoder.hidden, other.model._target_[-4:]) == (24, ".CTC")
    pretrained = untrained(tmp_path / "pretrained", *PRETRAINING)
    begun = compose(["recipe=finetune", f"init_from='{pretrained}'"])
    assert (begun.encoder.width, begun.model._target_[-4:], begun.tokenizer.alphabet) == (96, ".CTC", None)
    assert compose(["recipe=finetune"]).encoder.width == 768  # what was offered before is forgotten


@pytest.mark.slow
def test_start_jobs_gives_each_job_of_a_sweep_its_own_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recogniser = untrained(tmp_path / "recogniser", *RECOGNISER)
    pretrained = untrained(tmp_path / "pretrained", *PRETRAINING)
    line = ["-m", "recipe=finetune", "data=digits", f"run_dir={tmp_path / 'sweep'}", "dry_run=true"]
    for beginnings, key in (
        (f"{recogniser},{pretrained}", "encoder.hidden=24"),
        (f"{pretrained},{recogniser}", "encoder.width=96"),
    ):
        exit_code = exit_code_of(lambda: train.run([*line, f"init_from={beginnings}", key]))  # noqa: B023
        output = capsys.readouterr()
        assert exit_code == ConfigError.exit_code
        assert output.out.count("speechtrain.train_rank") == 1
        assert "1 of 2 jobs failed" in output.err
        assert f"{key.partition('=')[0]}: there is no such key" in output.err


def test_an_imported_model_brings_its_encoder(tmp_path: Path) -> None:
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder/imported.yaml").write_text(
        "_target_: speechtrain.encoders.lstm.LSTMEncoder\nhidden: 7\n"
    )
    assert compose(["recipe=finetune", f"init_from={tmp_path}"]).encoder.hidden == 7
    (tmp_path / "encoder/imported.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"imported\.yaml cannot be read"):
        compose(["recipe=finetune", f"init_from={tmp_path}"])


def test_tensors_are_kept_by_labels_and_never_by_shape(tmp_path: Path) -> None:
    run = untrained(tmp_path / "run", *RECOGNISER)
    weights = next((run / "checkpoints").glob("step-*/model.safetensors"))
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes(weights.read_bytes())

    def begun(place: Path, *overrides: str) -> set[str]:
        config = compose([*RECOGNISER, f"init_from={place}", *overrides])
        found = load_initial_weights(config, *build_task(config))
        return set(found.get("fresh for another vocabulary", "").split(", ")) - {""}

    assert not begun(run)
    other = begun(run, "tokenizer.alphabet=' ghijkl'")  # as many labels
    assert {"joint.output.weight", "prediction.embedding.weight"} <= other
    assert begun(alone) == other  # its labels are unknown
    with pytest.raises(ConfigError, match=r"joint\.\S+ is \(20.*here \(set the keys below model\."):
        begun(run, "model.joint.hidden=24")


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
def test_the_beginning_of_a_stranger_reads_no_environment(
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


@pytest.mark.usefixtures("cache")
def test_transcripts_that_the_normaliser_empties_are_not_called_missing(tmp_path: Path) -> None:
    train = lines(tmp_path, ["?!…"] * 5)
    with pytest.raises(DataError, match=r"normaliser=unicode leaves nothing .*, such as '\?!…'"):
        followed("recipe=scratch", f"data.train={train}")
    config = followed("recipe=scratch", f"data.train={train}", "tokenizer.normaliser=none")
    assert config.tokenizer.alphabet == "!?…"


def test_rare_characters_are_few_enough_to_lose() -> None:
    counts, held = (
        Counter({"a": 10**6, "b": 40, "x": 1, "y": 2}),
        Counter({"a": 5000, "b": 30, "x": 1, "y": 2}),
    )
    assert rare_characters(counts, held, max_skipped=5.0) == ["x", "y"]
    assert rare_characters(counts, held, max_skipped=2.0) == ["x"]
    assert rare_characters(counts, held, max_skipped=0.0) == []
    many = Counter({"a": 10**7, "b": 40})
    utterances = Counter({"a": 10**5, "b": 30})
    assert rare_characters(many, utterances, max_skipped=100.0) == ["b"]  # below 1 in 100,000


def lines(folder: Path, texts: list[str], name: str = "train.jsonl", seconds: float = 2.0) -> str:
    """A manifest; the recordings need not exist."""
    records = [
        {"audio_filepath": f"{number}.wav", "duration": seconds, "text": text}
        for number, text in enumerate(texts)
    ]
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder / name)


def followed(*overrides: str, written: dict[str, str] | None = None) -> DictConfig:
    config = composed(*overrides, "run_dir=/nowhere")
    check(config)
    follow_data(config, explicit_keys(overrides, written or {}))
    check(config)
    return config


@pytest.mark.usefixtures("cache")
def test_the_alphabet_is_that_of_the_transcripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["E\u0301te\u0301, ñandú!", "mbώngω yé"] * 1500 + ["ÿ"]
    train = lines(tmp_path, texts)
    config = followed("data=manifest", f"data.train={train}", "tokenizer=auto")
    assert config.tokenizer.alphabet == "".join(sorted(" abdgmntyéñúωώ"))
    assert "1 rare characters have no label, 1 recordings are skipped: 'ÿ' (1)" in capsys.readouterr().out
    assert keys_from_data(config.from_data) == {"tokenizer"}
    assert config.encoder.hidden == 256


@pytest.mark.usefixtures("cache")
def test_hours_enough_make_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "_PIECES", ((0.5, 17),))
    train = lines(tmp_path, ["one two three four", "seven eight nine zero"] * 1000)
    one, two = (followed("data=manifest", f"data.train={train}", "tokenizer=auto") for _ in range(2))
    assert one.tokenizer == two.tokenizer
    tokenizer = build_tokenizer(one)
    assert (tokenizer.size, tokenizer.normalise("ONE, Two!")) == (18, "one two")
    monkeypatch.setattr(sizing, "_PIECES", ((0.5, 500),))
    assert "alphabet" in followed("data=manifest", f"data.train={train}", "tokenizer=auto").tokenizer
    characters = followed(
        "data=manifest", f"data.train={lines(tmp_path, ['ab'] * 9, 'b.jsonl')}", "tokenizer=auto"
    )
    assert characters.tokenizer.alphabet == "ab"


@pytest.mark.usefixtures("cache")
def test_what_is_typed_wins(tmp_path: Path) -> None:
    train = lines(tmp_path, ["a quick brown fox jumps over it all"] * 50)
    base = ["recipe=scratch", f"data.train={train}"]
    free = followed(*base)
    assert (free.encoder.features.hop_seconds, free.encoder.subsampling, free.data.batch.count) == (
        0.01,
        2,
        4,
    )
    typed = followed(*base, "encoder.subsampling=8", "optimizer=lamb", "data.batch.count=7")
    assert (typed.encoder.subsampling, typed.data.batch.count, typed.optimizer.lr) == (8, 7, 4e-3)
    assert not keys_from_data(typed.from_data) & {"encoder.subsampling", "optimizer.lr", "data.batch.count"}
    lstm = followed(*base, "encoder=lstm_small")
    assert (lstm.encoder.features.splice, lstm.encoder.stack_time) == (3, 2)  # its own frame
    assert not {k for k in keys_from_data(lstm.from_data) if k.startswith("encoder.")}
    other = followed(*base, "model=ctc", "encoder=wav2vec2_small", "tokenizer=characters")
    assert other.encoder.width == 192
    assert other.tokenizer.alphabet.startswith(" abc")
    own = {"recipe/mine": "# @package _global_\nencoder:\n  hidden: 64\n", "optimizer/my": "lr: 1.0\n"}
    assert explicit_keys(["data=manifest"], own) == {"encoder.hidden", "optimizer.lr"}


@pytest.mark.usefixtures("cache")
def test_the_longest_recording_follows_from_the_data_and_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "free_memory", lambda: 2**40)
    train = lines(tmp_path, ["a quick brown fox"] * 9, seconds=34.5)
    base = ["recipe=scratch", "device=cpu", f"data.train={train}"]
    config = followed(*base)
    assert config.data.max_seconds == 35.0
    assert "9 recordings, 0.09 h" in config.from_data
    assert "data.max_seconds=35.0" in config.from_data
    short = lines(tmp_path, ["a quick brown fox"] * 9, "short.jsonl", seconds=3.0)
    unchanged = followed("recipe=scratch", f"data.train={short}")
    assert (unchanged.data.max_seconds, "data.max_seconds" in unchanged.from_data) == (20.0, False)
    assert followed(*base, "data.max_seconds=50").data.max_seconds == 50.0
    long = lines(tmp_path, ["a quick brown fox"] * 9, "long.jsonl", seconds=90.0)
    with pytest.raises(DataError, match=r"none of 9 recordings is between 0\.1 and 60 s long"):
        followed("recipe=scratch", f"data.train={long}")
    monkeypatch.setattr(host, "free_memory", lambda: 2**29)
    assert 20.0 < followed(*base).data.max_seconds < 35.0


@pytest.mark.usefixtures("cache")
def test_bad_data_is_one_line(tmp_path: Path) -> None:
    absent = ["recipe=scratch", f"data.train={tmp_path}/nowhere"]
    with pytest.raises(DataError, match="nowhere does not exist") as error:
        followed(*absent)
    assert "before the ranks start" not in str(error.value)
    with pytest.raises(DataError, match=r"nowhere does not exist.*auto reads data.train on this host"):
        followed(*absent, "launcher=slurm")
    with pytest.raises(DataError, match="no recording has a transcript"):
        followed("recipe=scratch", f"data.train={lines(tmp_path, ['', ' '])}")
    with pytest.raises(ConfigError, match="from_data=nothing: choose scratch"):
        followed("data=manifest", f"data.train={lines(tmp_path, ['a'])}", "from_data=nothing")
