"""Every YAML of every group: it composes, passes the check, implements its interface, and lists every key.

The choices are found in ``conf/``: a new model, device or schedule is tested by being there.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from omegaconf import DictConfig, OmegaConf

from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy
from speechtrain.encoders.base import Encoder
from speechtrain.errors import ConfigError, MachineError
from speechtrain.launch.launcher import Job
from speechtrain.start.build import dry_build
from speechtrain.start.check_keys import check
from speechtrain.start.choices import corpora
from speechtrain.start.named_corpus import corpus_by_name
from speechtrain.start.resolved import dump
from speechtrain.start.run_config import part_of, run_config
from speechtrain.start.schema import BORROWED_GROUPS, INJECTED, INTERFACES, NESTED_GROUPS
from speechtrain.start.targets import target_class
from speechtrain.task import Task
from speechtrain.text.vocabulary import train_sentencepiece

from .conftest import ALL, CONF, PARTS, choices, composed, folder_of, run_in_forks

BASES = [] if PARTS else sorted((p.parent.name, p.stem) for p in CONF.glob("*/_*.yaml"))
NETWORKS = [c for c in ALL if c[0] in ("model", "encoder", "prediction") and c != ("encoder", "none")]
CONSTRUCTED = [choice for choice in ALL if choice[0] in INTERFACES]
# models of choices that a recogniser does not take
TOGETHER = dict.fromkeys([("tokenizer", "none"), ("encoder", "none"), ("decoder", "none")], "wav2vec2_small")
TEXTS = [
    "one two three",
    "four five six",
    "seven eight nine zero",
    "oh a b c d e f g h i j k l m n o p q r s t",
]


@contextmanager
def skipped_without_extra() -> Iterator[None]:
    """Skips a choice whose library is an extra that is not installed, with the line that users get."""
    try:
        yield
    except MachineError as error:
        if "pip install -e '.[" not in str(error):
            raise
        pytest.skip(str(error))


def write_tokenizers(folder: Path) -> None:
    """Write ``tiny.model``, and a copy for each tokenizer of a corpus, as recipes read them."""
    train_sentencepiece(TEXTS, folder / "tiny.model", size=30)
    for corpus in corpora(None):
        below = folder / "manifests" / corpus
        below.mkdir(parents=True)
        for name in corpus_by_name({"corpus": corpus}).tokenizers:
            shutil.copy(folder / "tiny.model", below / name)


@pytest.fixture(scope="module")
def required(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Values for what some choices leave to the user: ``???`` in their YAML, and the folder of data sets."""
    folder = tmp_path_factory.mktemp("required")
    recordings = folder / "recordings"
    recordings.mkdir(parents=True)
    for name in itertools.product("0123456789", ("jackson", "theo"), ("0", "5", "6")):
        soundfile.write(recordings / f"{'_'.join(name)}.wav", [0.0] * 1600, 8000)
    write_tokenizers(folder)
    symbols = sorted(set("".join(TEXTS)))
    model = {"type": "BPE", "vocab": {symbol: label for label, symbol in enumerate(symbols)}, "merges": []}
    parts = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "truncation", "padding"))
    published = {"version": "1.0", **parts, "added_tokens": [], "decoder": {"type": "Fuse"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(published))
    (folder / "train.jsonl").write_text("")
    (folder / "hosts").write_text("127.0.0.1\n")
    values = {
        "tokenizer.model": str(folder / "tiny.model"),
        "huggingface: tokenizer.model": str(folder / "tokenizer.json"),
        "data.train": str(folder / "train.jsonl"),
        "data.valid.dev": str(folder / "train.jsonl"),
        "run_dir": str(folder / "run"),
        "launcher.image": "registry.example/speechtrain:1",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATASET_DIR", str(folder))
        patch.setenv("HOSTFILE", str(folder / "hosts"))
        yield values


def _config(required: dict[str, str], group: str, choice: str, **values: Any) -> DictConfig:
    model = (
        [f"model={TOGETHER.get((group, choice), 'rnnt_small')}"] if group not in ("model", "recipe") else []
    )
    config = composed(group, choice, *model)
    for key in sorted(OmegaConf.missing_keys(config)):
        assert key in required, f"{group}={choice} needs {key}: give it a value in the fixture `required`"
        OmegaConf.update(config, key, required.get(f"{choice}: {key}", required[key]))
    config.run_dir = required["run_dir"]
    if config.tokenizer.get("alphabet", "") is None:  # what the command takes from the transcripts
        config.tokenizer.alphabet = " abcdefghijklmnopqrstuvwxyz'"
    for key, value in values.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    return config


def _keys(node: Any, path: str) -> list[str]:
    """Constructor parameters, at any depth, that a YAML neither lists nor is given by the worker."""
    if isinstance(node, list):
        return [key for index, inner in enumerate(node) for key in _keys(inner, f"{path}[{index}]")]
    if not isinstance(node, dict):
        return []
    absent = []
    if "_target_" in node:
        parameters = inspect.signature(target_class(node["_target_"], path)).parameters.values()
        offered = INJECTED.get(path, set())
        absent = [
            f"{path}.{p.name}"
            for p in parameters
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            and p.name not in node
            and p.name not in offered
        ]
    return absent + [key for name, inner in node.items() for key in _keys(inner, f"{path}.{name}")]


@pytest.mark.parametrize(("group", "choice"), ALL)
def test_it_composes_and_passes_the_check(group: str, choice: str, required: dict[str, str]) -> None:
    config = _config(required, group, choice)
    check(config)
    if group in ("recipe", "tokenizer", "optimizer", "schedule", "augment", "data"):
        with skipped_without_extra():
            dry_build(run_config(config))


@pytest.mark.parametrize(("group", "choice"), CONSTRUCTED)
def test_every_key_can_be_set_without_a_plus(group: str, choice: str, required: dict[str, str]) -> None:
    node = OmegaConf.to_container(_config(required, group, choice)[group], resolve=True)
    absent = _keys(node, group)
    if node["_target_"].startswith("torch.optim."):  # type: ignore[index, call-overload]
        # switches of torch that are no part of the method
        absent = [
            a for a in absent if a.rpartition(".")[2] not in ("maximize", "capturable", "differentiable")
        ]
        absent = [a for a in absent if a.rpartition(".")[2] not in ("decoupled_weight_decay",)]
    assert not absent


@pytest.mark.skipif(bool(PARTS), reason="another package has some groups only")
def test_every_group_has_its_interface_and_its_default() -> None:
    assert {folder for folder, _ in ALL} - {"recipe", "sweep"} == {*INTERFACES, *NESTED_GROUPS} - {
        *BORROWED_GROUPS
    }


def _inherited(group: str, name: str) -> list[str]:
    """What a file's ``defaults`` name of its own group."""
    (folder,) = folder_of(group, name) or [str(CONF)]
    listed = OmegaConf.load(Path(folder) / group / f"{name}.yaml").get("defaults", [])
    return [item for item in listed if isinstance(item, str) and item != "_self_"]


@pytest.mark.parametrize(("group", "base"), BASES)
def test_a_base_yaml_has_at_most_one_base_and_several_files_that_inherit_it(group: str, base: str) -> None:
    above = _inherited(group, base)
    assert len(above) <= 1
    assert not [further for name in above for further in _inherited(group, name)]
    files = [*choices(group), *(name for other, name in BASES if other == group)]
    assert sum(base in _inherited(group, name) for name in files) > 1


# --- device -------------------------------------------------------------------------------------

_IMPORTS = """
import os, sys, torch
before = dict(os.environ)
from speechtrain.start.run_config import _construct
"""
_PURE = """
device = _construct("device", json.loads(sys.argv[1]), {})
one, eight = device.environment(1), device.environment(8)
assert one == device.environment(1) and dict(os.environ) == before
for found in (one, eight):
    assert all(isinstance(k, str) and isinstance(v, str) for k, v in found.items()), found
vendors = ("habana_frameworks", "intel_extension_for_pytorch")
assert not [name for name in sys.modules if name.startswith(vendors)]
assert not torch.cuda.is_initialized()
"""


@pytest.fixture(scope="module")
def constructed(required: dict[str, str]) -> dict[str, tuple[int, str]]:
    """The outcome of ``_PURE`` for each device."""
    arguments = {}
    for choice in choices("device"):
        node = OmegaConf.to_container(_config(required, "device", choice).device, resolve=True)
        arguments[choice] = [json.dumps(node)]
    return run_in_forks(_IMPORTS, _PURE, arguments)


@pytest.mark.parametrize("choice", choices("device"))
def test_device(choice: str, required: dict[str, str], constructed: dict[str, tuple[int, str]]) -> None:
    config = _config(required, "device", choice)
    assert constructed[choice] == (0, "")
    device = part_of(config, "device").build()
    assert device.supports(torch.float32)
    assert isinstance(device.supports(torch.float16), bool)
    assert device.name
    assert device.facts.collectives.get("cpu", "gloo") == "gloo"  # without one, the host has its own group
    assert device.name in device.facts.collectives
    assert re.search(device.facts.peer_lost, device.facts.collectives[device.name])
    assert isinstance(device.static_shapes, bool)
    assert device.graphs() >= 0
    assert not device.supports(torch.float64)
    torch.device(device.name)  # what autocast is told
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert "\n" not in device.precision_fallback_reason(dtype)
        policy = device.policy(dtype)
        assert policy.static_shapes == device.static_shapes
        assert ComputePolicy.from_record(json.loads(json.dumps(policy.record()))) == policy


# --- launcher -----------------------------------------------------------------------------------

AWKWARD = "a b'c\"d $(echo no) `no` \\ ; & | * ~ #\n\tend é"


ENGINES = Path(__file__).parent / "engines"
"""Stand-ins for ``ssh`` and the like: they run what they are given on this machine, as those would."""


WITNESS = """
import os, pathlib, sys
pathlib.Path({told!r}).write_text(os.environ["AWKWARD"] + chr(0) + sys.argv[-1], encoding="utf-8")
run_dir = pathlib.Path(sys.argv[-1]).parent
(run_dir / "result.json").write_text('{{"status": "finished"}}')
"""


@pytest.mark.parametrize("choice", choices("launcher"))
def test_launcher_renders_what_a_shell_runs(
    choice: str, required: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = (str(ENGINES), os.path.dirname(sys.executable), os.environ["PATH"])
    monkeypatch.setenv("PATH", os.pathsep.join(folders))  # a container has a python of its own
    monkeypatch.setenv("SPEECHTRAIN_API_TOKEN", "hush")
    config = _config(required, "launcher", choice)
    launcher = part_of(config, "launcher").build()
    run_dir = tmp_path / AWKWARD
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(dump(config))  # what runs first on each host reads it
    job = Job(run_dir / "config.yaml", run_dir, 1, {"AWKWARD": AWKWARD, "PLAIN": "1", "A_SECRET": "hush"})
    text = launcher.render(job)
    assert "speechtrain.rank" in text
    assert "hush" not in text
    # the worker line replaced by a program that writes down what reached it
    told = tmp_path / "told"
    program = tmp_path / "program.py"  # a name that needs no quotes, at whatever depth it stands
    program.write_text(WITNESS.format(told=str(told)))
    with subprocess.Popen(
        ["sh", "-c", _with_program(text, str(program))],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stderr is not None  # its standard input stays open meanwhile
        complaint = running.stderr.read()
        assert running.wait(60) == 0, complaint
    assert told.read_text(encoding="utf-8").split("\0") == [AWKWARD, str(job.config)]


def _with_program(text: str, program: str) -> str:
    """``-m speechtrain.rank`` replaced, be it part of a line or two items of a JSON list."""
    replaced, count = re.subn(r'("?)-m\1,?\s+\1speechtrain\.rank\1', rf"\1{program}\1", text)
    assert count == 1, "the worker line stands there in another way: extend this test"
    return replaced


# --- optimizer, schedule, precision -------------------------------------------------------------


@pytest.mark.parametrize("choice", choices("optimizer"))
def test_optimizer_lowers_a_quadratic(choice: str, required: dict[str, str]) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, 3))
    with skipped_without_extra():
        optimizer = part_of(_config(required, "optimizer", choice), "optimizer").build(
            params=[{"params": [weight]}]
        )
    before = weight.detach().square().sum()
    for _ in range(3):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
    assert weight.detach().square().sum() < before
    again = part_of(_config(required, "optimizer", choice), "optimizer").build(params=[{"params": [weight]}])
    again.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("choice", choices("schedule"))
def test_schedule_rates(choice: str, required: dict[str, str]) -> None:
    config = _config(required, "schedule", choice)
    schedule = part_of(config, "schedule").build(steps_per_epoch=50, planned_steps=5000)
    peak = config.optimizer.lr
    rates = [schedule.rate(step) for step in range(1, 5000)]
    assert all(math.isfinite(rate) and 0 <= rate <= peak * (1 + 1e-9) for rate in rates)
    assert all(rate > 0 for rate in rates[1:])  # Intel's first update has rate 0
    other = part_of(config, "schedule").build(steps_per_epoch=7, planned_steps=77)
    other.load_state_dict(schedule.state_dict())
    assert [other.rate(step) for step in range(1, 5000)] == rates


@pytest.mark.parametrize("choice", choices("precision"))
def test_precision_updates_and_keeps_its_state(choice: str, required: dict[str, str]) -> None:
    precision = part_of(_config(required, "precision", choice), "precision").build()
    assert precision.name == choice
    assert precision.dtype in (torch.float32, torch.bfloat16, torch.float16)
    linear = torch.nn.Linear(4, 4)
    before = linear.weight.detach().clone()
    optimizer = torch.optim.SGD(linear.parameters(), 0.1)
    precision.backward(linear(torch.ones(2, 4)).square().sum())
    precision.unscale(optimizer)
    precision.step(optimizer)
    assert not torch.equal(before, linear.weight)
    assert linear.weight.dtype == torch.float32
    precision.load_state_dict(precision.state_dict())


# --- tracking, tokenizer, augment -----------------------------------------------------------------


@pytest.mark.parametrize("choice", choices("tracking"))
def test_tracker_never_raises(choice: str, required: dict[str, str], tmp_path: Path) -> None:
    config = _config(required, "tracking", choice)
    config.run_dir = str(tmp_path / "run")
    tracker = part_of(config, "tracking").build()
    for values in (
        {},
        {"step": 1, "loss": math.nan},
        {"step": None, "loss": "text", "rows": None, "odd": object()},
    ):
        for event in (
            "start",
            "train",
            "valid",
            "examples",
            "checkpoint",
            "warning",
            "resume",
            "no such event",
        ):
            tracker.log(event, values)
    tracker.close()
    tracker.close()


@pytest.mark.parametrize("choice", choices("tokenizer"))
def test_tokenizer(choice: str, required: dict[str, str], tmp_path: Path) -> None:
    config = _config(required, "tokenizer", choice)
    tokenizer = part_of(config, "tokenizer").build()
    assert tokenizer.blank == tokenizer.size - 1 == len(tokenizer.labels)
    for text in TEXTS[:3]:
        normal = tokenizer.normalise(text)
        ids = tokenizer.encode(normal)
        assert all(0 <= i < tokenizer.blank for i in ids)
        assert tokenizer.decode(ids) == normal
        assert tokenizer.unknown(normal) == set()
    assert tokenizer.encode("") == []
    assert tokenizer.unknown("日") == {"日"}
    with pytest.raises(ValueError, match="日"):
        tokenizer.encode("日")
    with pytest.raises(ValueError, match="label ids"):
        tokenizer.decode([tokenizer.blank])
    tokenizer.save(str(tmp_path))
    config.tokenizer.update(type(tokenizer).saved_arguments(str(tmp_path)))
    assert part_of(config, "tokenizer").build().state() == tokenizer.state()


@pytest.mark.parametrize("choice", choices("augment"))
def test_augment_does_nothing_in_evaluation(choice: str, required: dict[str, str]) -> None:
    augment = part_of(_config(required, "augment", choice), "augment").build()
    audio, lengths = torch.randn(3, 800), torch.tensor([800, 700, 1])
    features, frames = torch.randn(3, 50, 8), torch.tensor([50, 40, 1])
    augment.eval()
    state = torch.get_rng_state()
    assert torch.equal(augment.waveform(audio, lengths), audio)
    assert torch.equal(augment.spectrogram(features, frames), features)
    assert augment.warp(3, torch.device("cpu")) is None
    assert torch.equal(torch.get_rng_state(), state)  # evaluation draws nothing
    augment.train()
    assert augment.waveform(audio, lengths).shape == audio.shape
    assert augment.spectrogram(features, frames).shape == features.shape
    assert augment.speed[0] <= augment.speed[1]


# --- model and encoder ----------------------------------------------------------------------------


def _batch(tokenizer: Any) -> Batch:
    torch.manual_seed(0)
    texts = ("one two", "") if tokenizer.reads_text else ("", "")
    labels = [tokenizer.encode(text) for text in texts]
    width = max(map(len, labels))
    lengths = torch.tensor([12_000, 8_000])
    audio = torch.randn(2, 12_000) * 0.1 * (torch.arange(12_000) < lengths[:, None])
    return Batch(
        audio=audio,
        audio_lengths=lengths,
        labels=torch.tensor([ids + [0] * (width - len(ids)) for ids in labels]),
        label_lengths=torch.tensor([len(ids) for ids in labels]),
        weight=torch.tensor([1.0, 0.0]),
        keys=torch.tensor([1, 2]),
        ids=("a", ""),
        texts=texts,
    )


def _task(config: DictConfig) -> tuple[Any, Any]:
    tokenizer = part_of(config, "tokenizer").build()
    encoder = part_of(config, "encoder").build(augment=part_of(config, "augment").build())
    return part_of(config, "model").build(tokenizer=tokenizer, encoder=encoder), tokenizer


def _shrunk(config: DictConfig) -> DictConfig:
    """The same network with few units and few equal layers, for speed: each kind of layer is there."""
    if "layers" in config.encoder:
        config.encoder.layers = min(2, config.encoder.layers)
    if "blocks" in config.encoder:
        blocks = []
        for block in config.encoder.blocks:
            repeat = block.get("repeat", config.encoder.repeat)
            blocks.append({**block, "times": 1, "repeat": min(2, repeat)})
        config.encoder.blocks = blocks
    for group in ("model", "encoder"):
        for key, value in config[group].items():
            if (
                isinstance(value, int)
                and not isinstance(value, bool)
                and value >= 64
                and "max_" not in str(key)
                and key != "sample_rate"
            ):
                config[group][key] = 48  # which 4, 12 and 16 heads divide
    return config


@pytest.mark.parametrize(("group", "choice"), NETWORKS)
def test_network_learns_and_evaluates(group: str, choice: str, required: dict[str, str]) -> None:
    torch.manual_seed(0)
    task, tokenizer = _task(_shrunk(_config(required, group, choice)))
    raw = _batch(tokenizer)
    task.train()
    task.advance(0, seed=1)
    batch = task.prepare(raw, seed=2)
    loss = task(batch)
    assert loss.total.dtype == loss.weight.dtype == torch.float32
    assert loss.total.shape == loss.weight.shape == ()
    assert math.isfinite(loss.total.item())
    assert loss.weight.item() > 0
    filler = dataclasses.replace(raw, weight=torch.zeros(2), ids=("", ""), texts=("", ""))
    assert task(task.prepare(filler, seed=2)).weight.item() == 0
    loss.total.backward()
    without = [name for name, p in task.named_parameters() if p.requires_grad and p.grad is None]
    assert not without
    assert all(bool(p.grad.isfinite().all()) for p in task.parameters() if p.grad is not None)
    grouped = [id(p) for g in task.parameter_groups() for p in g["params"]]
    assert sorted(grouped) == sorted(id(p) for p in task.parameters() if p.requires_grad)

    task.eval()
    batch = task.prepare(raw, seed=3)
    with torch.no_grad():
        found = [task.evaluate(batch, task.decoder) for _ in range(2)]
    assert task.metric in found[0].metrics
    for name, (total, count) in found[0].metrics.items():
        assert math.isfinite(total.item()), name
        assert count.item() > 0, name
        assert torch.equal(total, found[1].metrics[name][0]), f"{name} is not the same twice"
    if type(task).transcribe is not Task.transcribe:
        assert [e.id for e in found[0].examples] == ["a"]
        assert len(task.transcribe(batch, task.decoder)) == 2
    task.load_state_dict(task.state_dict())
    assert task.footprint().bytes(2, 1.0, 7) >= 0
    if isinstance(encoder := getattr(task, "encoder", None), Encoder):
        assert 0 < encoder.frames(8_000) <= encoder.frames(12_000)


def _row(batch: Batch, row: int) -> Batch:
    """One row of a batch without its padding."""
    values = {}
    for name, value in vars(batch).items():
        values[name] = value[row : row + 1] if isinstance(value, torch.Tensor | tuple) else value
    values["audio"] = values["audio"][:, : int(batch.audio_lengths[row])]
    return Batch(**values)


@pytest.mark.parametrize("choice", [choice for choice in choices("encoder") if choice != "none"])
def test_an_encoder_reads_no_padding_and_predicts_its_frames(choice: str, required: dict[str, str]) -> None:
    torch.manual_seed(0)
    config = _shrunk(_config(required, "encoder", choice))
    encoder = part_of(config, "encoder").build(augment=part_of(config, "augment").build()).eval()
    batch = _batch(part_of(config, "tokenizer").build())
    encoder.check(batch)
    with torch.no_grad():
        frames, lengths = encoder.encode(encoder.prepare(batch, seed=3))
        for row, samples in enumerate(batch.audio_lengths.tolist()):
            alone, length = encoder.encode(encoder.prepare(_row(batch, row), seed=3))
            count = encoder.frames(samples)
            assert count == lengths[row] == length[0], "frames() and forward disagree"
            if not encoder.reads_padding:
                torch.testing.assert_close(frames[row, :count], alone[0, :count], rtol=1e-3, atol=1e-3)


# --- decoder ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["rnnt_small", "ctc"])
@pytest.mark.parametrize("choice", choices("decoder"))
def test_a_decoder_reads_a_model_or_says_what_it_reads(
    choice: str, model: str, required: dict[str, str]
) -> None:
    torch.manual_seed(0)
    task, tokenizer = _task(_shrunk(composed("model", model)))
    task.decoder = part_of(_config(required, "decoder", choice), "decoder").build()
    task.eval()
    batch = task.prepare(_batch(tokenizer), seed=3)
    with torch.no_grad():
        encoded, lengths = task.encoder.encode(batch)
        try:
            found = task.hypotheses(encoded, lengths, task.decoder)
        except ConfigError as error:
            refused = str(error)
        else:
            refused = ""
        if refused:
            assert refused.startswith(f"decoder={choice} ")
            assert refused.isprintable()
            return
        alone = [
            task.hypotheses(encoded[row, None], lengths[row, None], task.decoder)[0]
            for row in range(len(lengths))
        ]
    assert [h.labels for h in found] == [h.labels for h in alone], "it depends on the batch"
    for hypothesis, length in zip(found, lengths.tolist(), strict=True):
        assert hypothesis.text == tokenizer.decode(hypothesis.labels)
        assert len(hypothesis.times) == len(hypothesis.labels)
        assert list(hypothesis.times) == sorted(hypothesis.times)
        assert all(0 <= time < length * task.frame_seconds for time in hypothesis.times)
        assert math.isfinite(hypothesis.score)
