"""One payload for each rule of SECURITY.md and each command that reads data: a table, and how it is run."""

# ruff: noqa: E501 - tables of cases

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
import yaml
from safetensors.torch import save_file

from speechtrain.data.formats.lhotse_cuts import MOST_SAMPLES

from ..integration.conftest import INLINE
from . import payloads as p
from .payloads import CANARY, ESCAPES, RATE, RUN, TONE
from .runner import Ended, faults, run

SMALL = (
    *(
        "device.threads=1",
        "device.autotune=false",
        "data.workers=0",
        "tracking=jsonl",
        "encoder.hidden=16",
        *INLINE,
    ),
    *(
        "model.prediction.hidden=16",
        "model.prediction.embedding=8",
        "model.joint.hidden=16",
        "decoder.max_symbols=20",
    ),
)
DEMO = ("recipe=demo", "data.train.utterances=20", "data.valid.unheard.utterances=3", *SMALL)
OWN_DATA = (
    "model=rnnt_small",
    "data=manifest",
    "data.train=m.jsonl",
    "data.valid.dev=m.jsonl",
    "data.cache=cache",
    *SMALL,
)
SPOKEN = {"audio_filepath": "ok.wav", "duration": 2.0}
STEP = "checkpoints/step-00000001"
TAGS = "<img src=x onerror=alert(1)></script><script>alert(2)</script>\"'>&`${7*7}`\x1b[31m\u202e<!--]]>"
HF = {"model_type": "wav2vec2", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8,
      "conv_dim": [8], "conv_kernel": [10], "conv_stride": [5], "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 1}  # fmt: skip


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the user, after one update."""
    folder = tmp_path_factory.mktemp("good")
    ended = run(folder, "train", *DEMO, "trainer.max_steps=1", "run_dir=run")
    assert faults(ended, folder, refuses=False) == []
    return folder / "run"


@pytest.fixture
def folder(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recording, the user's run ``good`` and a stranger's ``run``."""
    monkeypatch.chdir(tmp_path)
    soundfile.write("ok.wav", TONE, RATE)
    Path("good").symlink_to(good)
    shutil.copytree(good, "run")
    text = Path("run/config.yaml").read_text().partition("\n")[2]
    Path("run/config.yaml").write_text(text.replace(str(good), str(tmp_path / "run")))
    return tmp_path


COMMANDS: dict[str, tuple[str, ...]] = {
    "prepare": ("prepare", "manifest", "m.jsonl", "--check", "--jobs", "1", "--out", "out/o.jsonl"),
    "prepare gzip": ("prepare", "manifest", "m.jsonl.gz", "--check", "--jobs", "1", "--out", "out/o.jsonl"),
    "prepare folder": ("prepare", "manifest", "corpus", "--check", "--jobs", "1", "--out", "out/o.jsonl"),
    "convert": ("prepare", "convert", "m.jsonl", "--jobs", "1", "--out", "converted"),
    "evaluate": ("evaluate", "good", "--set", "x=m.jsonl", "device.threads=1", "data.workers=0", "data.cache=cache"),
    "train": ("train", *OWN_DATA, "trainer.max_steps=1", "run_dir=new"),
    "train with a tokenizer": ("train", *DEMO, "tokenizer=sentencepiece", "tokenizer.model=a.model", "dry_run=true", "run_dir=new"),
    "transcribe": ("transcribe", "good", "corpus/a.wav", "device.threads=1"),
    "export fairseq": ("export", "m.pt", "--from", "fairseq", "--out", "out"),
    "export hugging face": ("export", "hf", "--from", "huggingface", "--out", "out"),
    "init_from": ("train", *DEMO, "trainer.max_steps=1", "init_from=m.pt", "run_dir=new"),
    "evaluate a run": ("evaluate", "run", "device.threads=1", "data.workers=0"),
    "transcribe with a run": ("transcribe", "run", "ok.wav", "device.threads=1"),
    "report": ("report", "run", "--out", "page.html"),
    "continue": ("train", "trainer.max_steps=2", "run_dir=run"),
}  # fmt: skip


def file(name: str, payload: Any) -> Callable[[], None]:
    return lambda: p.place(Path(name), payload)


def lines(*records: object) -> Callable[[], None]:
    return file("m.jsonl", "".join(json.dumps(record) + "\n" for record in records))


def private_text() -> None:
    lines({**SPOKEN, "text_filepath": "a.txt"})()
    p.place(Path("a.txt"), p.link)


def named_like_a_command() -> None:
    Path("corpus").mkdir()
    for name in (f"x;{RUN};.sph", f"x$({RUN}).opus", f"pipe:{RUN}.m4a"):
        Path("corpus", name).write_bytes(b"NIST_1A\n   1024\n" + b"x" * 2000)


def named_with_escapes() -> None:
    Path("corpus").mkdir()
    Path("corpus", f"{ESCAPES}.wav").write_text("rubbish")
    Path("corpus", "x.trans.txt").write_text(f"{ESCAPES} {ESCAPES}\n")


def large_gzip() -> None:
    block = gzip.compress(b"a" * 2**24)
    Path("m.jsonl.gz").write_bytes(block * 256)


def remote_code(weights: Callable[[Path], object]) -> Callable[[], None]:
    """A model of Hugging Face with code of its own."""

    def make() -> None:
        remote = {"AutoModel": "strange.Strange", "AutoConfig": "strange.Strange"}
        p.place(Path("hf/config.json"), json.dumps({**HF, "auto_map": remote, "trust_remote_code": True}))
        p.place(Path("hf/strange.py"), f"open({CANARY!r}, 'w')\nclass Strange: pass\n")
        weights(Path("hf"))

    return make


def harmless_weights(folder: Path) -> None:
    save_file({"wav2vec2.masked_spec_embed": torch.zeros(8)}, folder / "model.safetensors")


def weights_that_call(folder: Path) -> None:
    p.place(folder / "pytorch_model.bin", p.saved({"wav2vec2.masked_spec_embed": p.Calls(os.system, RUN)}))


def config(key: str, value: Any) -> Callable[[], None]:
    """The stranger's run has this value in its config."""

    def make() -> None:
        path = Path("run/config.yaml")
        content = yaml.safe_load(path.read_text())
        *outer, last = key.split(".")
        node = content
        for name in outer:
            node = node[name]
        node[last] = value
        path.write_text(yaml.safe_dump(content, sort_keys=False, width=10**9))

    return make


def state(payload: bytes) -> Callable[[], None]:
    """The stranger's run has this state, with digests that fit."""

    def make() -> None:
        p.place(Path("run", STEP, "state.safetensors"), payload)
        p.sign(Path("run", STEP))

    return make


def strange_manifest() -> None:
    more = {"metrics": {"wer": 10**400, "\x1b]0;x\x07": 1.0}, "wall_s": "x"}
    p.sign(Path("run", STEP), **more)


def strange_log() -> None:
    row = {"id": TAGS, "reference": TAGS, "hypothesis": "a"}
    events = [{"event": "examples", "step": 1, "set": TAGS, "rows": [row]}, {"event": "warning", "message": TAGS},
              {"event": "train", "step": 1e308, TAGS: 3.0}, {"event": "valid", "step": 10**400, "set": TAGS, "wer": "x"}]  # fmt: skip
    p.place(Path("run/metrics.jsonl"), "".join(json.dumps(event) + "\n" for event in events))
    p.place(Path("run/run.json"), json.dumps({"argv": [TAGS] * 10**5, "overrides": [], "git": {TAGS: 1}}))


RESULT = json.dumps({"status": "finished\x1b[2J", "steps": 10**400, "metrics": {"wer\x1b]0;x\x07": [1]}})
RESPONSE = p.cut(p.recording(transforms=[p.reverb(p.recording(RUN, "command"))]))
STRANGE_CLASS = {"_target_": "os.system", "command": RUN}
PICKLE = p.pickled(b"cos\nsystem\nX\x0c\0\0\0touch CANARY\x85R")


@dataclass(frozen=True)
class Attack:
    rule: str
    title: str
    payload: Callable[[], None]
    commands: tuple[str, ...]
    words: str | None
    """A pattern of what the command says when it refuses, an empty text if it succeeds, None if it may do both."""


ATTACKS = [
    Attack("code", "a command as an impulse response", lines(RESPONSE), ("prepare", "evaluate", "convert", "train"), "transform 'Reverb"),
    Attack("code", "names like commands of a shell", named_like_a_command, ("prepare folder",), "bad: corpus/x"),
    Attack("code", "a pickle that calls", file("m.pt", PICKLE), ("export fairseq", "init_from"), r"names os\.system"),
    Attack("code", "settings that call", file("m.pt", p.fairseq({"conv_feature_layers": f"__import__('os').system('{RUN}')"})), ("export fairseq",), "not a list of triples"),
    Attack("code", "code beside a model", remote_code(harmless_weights), ("export hugging face",), "is missing, and the config needs it"),
    Attack("code", "weights that call", remote_code(weights_that_call), ("export hugging face",), r"names posix\.system"),
    Attack("code", "a class that is no part", config("tokenizer", STRANGE_CLASS), ("evaluate a run", "transcribe with a run", "continue"), r"os\.system is outside"),
    Attack("code", "an object of YAML", file("run/config.yaml", f"a: !!python/object/apply:os.system ['{RUN}']\n"), ("evaluate a run", "continue"), "is damaged"),
    Attack("code", "an object of YAML", file("run/config.yaml", f"a: !!python/object/apply:os.system ['{RUN}']\n"), ("report",), ""),
    Attack("code", "a state that calls", state(PICKLE), ("continue",), "cannot be read"),
    Attack("outside", "a cut's id is a path", lines(p.cut(id=f"../../{CANARY}")), ("convert",), None),
    Attack("outside", "a checkpoint's file is a path", lambda: p.sign(Path("run", STEP), files={"../../../x": "z"}), ("evaluate a run", "continue"), None),
    Attack("bounds", "a recording of many hours", file("corpus/a.wav", p.long_wav(MOST_SAMPLES + 1)), ("prepare folder",), "too much to read at once"),
    Attack("bounds", "a tuple doubled 40 times", file("m.pt", p.pickled(p.doubled(40))), ("export fairseq", "init_from"), "refer to each other too often"),
    Attack("bounds", "a slow speed, 16 times", lines(p.cut(p.recording(transforms=[p.speed(0.1)] * 16))), ("prepare", "evaluate", "train"), "the most are"),
    Attack("bounds", "an archive of 4 GiB", large_gzip, ("prepare gzip",), "not a manifest"),
    Attack("bounds", "zeros as manifest", file("m.jsonl", p.zeros), ("prepare", "evaluate", "convert"), "neither a file nor a folder"),
    Attack("bounds", "zeros as recording", lines({**SPOKEN, "audio_filepath": "/dev/zero", "text": "a"}), ("prepare", "evaluate"), "not a regular file"),
    Attack("bounds", "a pipe as recording", file("corpus/a.wav", p.pipe), ("prepare folder", "transcribe"), "not a regular file"),
    Attack("bounds", "a pipe as tokenizer", file("a.model", p.pipe), ("train with a tokenizer",), "not a regular file"),
    Attack("bounds", "a model of 10 GB", file("m.pt", p.sparse), ("export fairseq", "init_from"), "almost empty"),
    Attack("bounds", "a pipe as config", file("run/config.yaml", p.pipe), ("evaluate a run", "transcribe with a run", "continue"), "not a regular file|has no config|is missing"),
    Attack("bounds", "a network of 10^9 units", config("encoder.hidden", 10**9), ("evaluate a run", "continue"), "overflowed"),
    Attack("bounds", "a state of nested values", state(p.header({"__metadata__": {"values": p.DEEP}})), ("continue",), "RecursionError"),
    Attack("bounds", "numbers of 400 digits", file("run/result.json", RESULT), ("report", "continue"), None),
    Attack("bounds", "a strange checkpoint.json", strange_manifest, ("report", "evaluate a run", "continue"), None),
    Attack("privacy", "a private file as transcript", private_text, ("prepare",), "transcripts are read below"),
    Attack("privacy", "the environment as manifest", file("m.jsonl", lambda path: path.symlink_to("/proc/self/environ")), ("prepare", "evaluate"), "not a manifest"),
    Attack("privacy", "a variable in a config", config("tokenizer.alphabet", "${oc.decode:${oc.env:MY_TOKEN}}"), ("evaluate a run", "continue"), "refers to more than"),
    Attack("privacy", "a link as config", file("run/config.yaml", p.link), ("evaluate a run", "transcribe with a run"), "it is a link"),
    Attack("privacy", "a link as log", file("run/metrics.jsonl", p.link), ("report",), "it is a link"),
    Attack("terminal", "escapes in a manifest", lines(p.cut(p.recording(f"/no{ESCAPES}"), id=ESCAPES)), ("prepare", "evaluate", "convert"), "missing|does not exist"),
    Attack("terminal", "escapes in names", named_with_escapes, ("prepare folder",), "bad: corpus/a"),
    Attack("terminal", "escapes in a config", config("tokenizer.normaliser", f"a\n{ESCAPES}"), ("evaluate a run", "continue"), "is unknown"),
    Attack("terminal", "escapes in a page", strange_log, ("report",), ""),
]  # fmt: skip


class Handlers(HTMLParser):
    """The attributes of a page's tags that run code."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}" for name, _ in attrs if name.startswith("on")]


def faults_of_page(page: str) -> list[str]:
    """Return what is not inert in a page, apart from its own script and styles."""
    own = re.sub(r"<script>.*?</script>", "", page, count=1, flags=re.S)
    active = r"<script(?! type=\"application/json\")|<img|<iframe|<object|<embed|<base|javascript:|<!--"
    return [*re.findall(active, own), *Handlers(own).found]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("attack", "command"),
    [
        pytest.param(attack, command, id=f"{attack.rule}: {command}: {attack.title}")
        for attack in ATTACKS
        for command in attack.commands
    ],
)
def test_a_command_keeps_the_rules(attack: Attack, command: str, folder: Path) -> None:
    secret = p.home(folder).read_text()
    attack.payload()
    ended = run(folder, *COMMANDS[command], environment={"MY_TOKEN": secret})
    assert faults(ended, folder, attack.words if attack.words is None else bool(attack.words)) == []
    assert re.search(attack.words or "", ended.out + ended.err)
    assert p.home(folder).read_text() == secret
    page = folder / "page.html"
    if page.exists():
        assert faults_of_page(page.read_text()) == []
    if command.startswith("export"):
        assert not os.path.lexists(folder / "out")


def test_a_fault_is_seen(tmp_path: Path) -> None:
    held = Ended(2, "", "speechtrain: error: no\n")
    assert faults(held, tmp_path, refuses=True) == []
    assert faults(held, tmp_path, refuses=False)
    for code, err in ((0, "\x1b[2J"), (1, "speechtrain: internal error: x"), (2, ""), (-9, "")):
        assert faults(Ended(code, "", err), tmp_path), err
    (tmp_path / CANARY).touch()
    assert faults(held, tmp_path)
