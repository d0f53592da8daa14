"""One payload for each rule of SECURITY.md and each reader, which refuses it in one line or reads nothing."""

# ruff: noqa: E501 - tables of cases

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from speechtrain.launchers.mpi import Mpi
from speechtrain.launchers.ssh import Ssh

from speechtrain.batch import Skip
from speechtrain.checkpoint.checkpointer import Checkpointer
from speechtrain.commands.report import run as report
from speechtrain.data.audio import read_cut
from speechtrain.data.formats.lhotse_cuts import MOST_SAMPLES, UnknownField, known_cut
from speechtrain.data.recordings import Unusable
from speechtrain.data.skips import SkipLog
from speechtrain.data.sources import open_source
from speechtrain.distributed.world import World
from speechtrain.errors import RunError, SpeechtrainError, escape_controls, one_line
from speechtrain.files import write_json, write_text
from speechtrain.interop import wav2vec2_fairseq, wav2vec2_hf
from speechtrain.launch.launcher import Job
from speechtrain.launch.supervise import supervise
from speechtrain.rank.main import _redirect_output
from speechtrain.run_directory import RunLock, read_about, read_best, read_device, read_metrics, read_result
from speechtrain.start.resolved import load
from speechtrain.text.vocabulary import SentencePiece
from speechtrain.tracking.console import TextLog
from speechtrain.tracking.jsonl import Jsonl
from speechtrain.tracking.tensorboard import TensorBoard
from tests.support.audio_files import read_file
from tests.support.checkpoints import restore

from . import payloads as p
from .payloads import CANARY, DEEP, ESCAPES, LONG, PRIVATE, RATE, RUN, TONE

STEP = "checkpoints/step-00000001"
SETTINGS = {"conv_feature_layers": "[(8,10,5)]", "conv_pos_groups": 1, "encoder_attention_heads": 1}
HF = {"model_type": "wav2vec2", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recording and a run, in which the test works."""
    monkeypatch.chdir(tmp_path)
    soundfile.write("ok.wav", TONE, RATE)
    Path("config.yaml").write_text("seed: 1\n")
    write_json(tmp_path / "result.json", {"status": "finished"})
    Checkpointer(tmp_path).save(1, {}, {"a": torch.zeros(1)})
    return tmp_path


@pytest.fixture
def streams() -> Iterator[None]:
    """Brings standard output and error back, which a rank redirects to its file."""
    kept = {number: os.dup(number) for number in (1, 2)}
    yield
    for number, stream in kept.items():
        os.dup2(stream, number)
        os.close(stream)


def entries_of(path: Path) -> list[Any]:
    return list(open_source(str(path)).entries())  # type: ignore[attr-defined]


def hugging_face(path: Path) -> object:
    pytest.importorskip("transformers")
    p.place(path.with_name("model.safetensors"), p.header(p.tensor([1], 0, 4), b"\0" * 4))
    return wav2vec2_hf.read(path.parent)


def signed_state(path: Path) -> object:
    p.sign(path.parent)
    return restore(Checkpointer(Path.cwd()), {})


def signed_weights(path: Path) -> object:
    p.sign(path.parent)
    return Checkpointer(Path.cwd()).weights()


@dataclass(frozen=True)
class Door:
    """A reader, and the file in a folder that a stranger sends."""

    file: str
    read: Callable[[Path], object]


UNREAD_TEXT = json.dumps({"audio_filepath": "ok.wav", "duration": 2.0, "text_filepath": "a.txt"})
DOORS = {
    "fairseq": Door("a.pt", wav2vec2_fairseq.read),
    "hugging face": Door("config.json", hugging_face),
    "safetensors": Door("a.safetensors", wav2vec2_hf.read_safetensors),
    "state": Door(f"{STEP}/state.safetensors", signed_state),
    "weights": Door(f"{STEP}/model.safetensors", signed_weights),
    "checkpoint": Door(f"{STEP}/checkpoint.json", lambda path: Checkpointer(Path.cwd()).weights()),
    "config": Door("config.yaml", load),
    "cut": Door("cut.json", lambda path: read_cut(json.loads(path.read_text()), RATE)),
    "values of a cut": Door("cut.json", lambda path: known_cut(json.loads(path.read_text()))),
    "recording": Door("a.sph", lambda path: read_file(str(path), RATE)),
    "manifest": Door("m.jsonl", entries_of),
    "transcript": Door("a.txt", lambda path: [p.place(Path("t.jsonl"), UNREAD_TEXT), entries_of(Path("t.jsonl"))]),
    "transcripts": Door("a.trans.txt", lambda path: entries_of(path.parent)),
    "labels": Door("t.wrd", lambda path: [p.place(Path("t.tsv"), f"{Path.cwd()}\nok.wav\t32000\n"), entries_of(Path("t.tsv"))]),
    "tokenizer": Door("a.model", lambda path: SentencePiece(str(path))),
    "hosts of ssh": Door("hosts", lambda path: Ssh(str(path)).render(Job(Path("config.yaml"), Path.cwd(), world_size=1))),
    "hosts of mpi": Door("hosts", lambda path: Mpi(hostfile=str(path))._hosts()),
    "variables": Door("rank", lambda path: World.from_environment({"RANK": path.read_text(), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})),
}  # fmt: skip


@dataclass(frozen=True)
class Attack:
    rule: str
    door: str
    title: str
    payload: p.Payload
    words: str
    """A pattern of what the reader's line says."""

    def __str__(self) -> str:
        return f"{self.rule}: {self.door}: {self.title}"


def compressed(path: Path) -> None:
    """An archive whose entries are compressed, with a wrong checksum that is not to be reached."""
    content = p.zipped(
        ("data.pkl", pickle.dumps({}, 2)), ("data/0", b"0" * 10_000), compression=zipfile.ZIP_LZMA
    )
    path.write_bytes(content.replace(struct.pack("<I", zlib.crc32(b"0" * 10_000)), b"\1\2\3\4"))


def overlapping(path: Path) -> None:
    """An archive with two names for one content: the record of the second has the place and size of the first."""
    content = bytearray(
        p.zipped(("data.pkl", pickle.dumps({}, 2)), ("data/0", b"0" * 10_000), ("data/1", b""))
    )
    first, second = (content.rindex(name) - 46 for name in (b"archive/data/0", b"archive/data/1"))
    for field in (slice(16, 28), slice(42, 46)):  # checksum and sizes, offset
        content[second + field.start : second + field.stop] = content[
            first + field.start : first + field.stop
        ]
    path.write_bytes(content)


def holes(path: Path) -> None:
    with torch.serialization.skip_data():
        torch.save({"a": torch.empty(2**31, dtype=torch.uint8)}, path)


def holes_behind_a_header(path: Path) -> None:
    path.write_bytes(p.header(p.tensor([2**30], 0, 2**31, "BF16")))
    os.truncate(path, path.stat().st_size + 2**31)


def shared(path: Path) -> None:
    """Four names of one storage, which in memory would be four."""
    torch.save({f"w{number}": torch.zeros(1).expand(10**10) for number in range(4)}, path)


def endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def folder_link(path: Path) -> None:
    """A folder on the way to the transcript is a link."""
    Path("sub").symlink_to(p.home(Path.cwd()).parent)
    path.symlink_to("sub/id_rsa")


def a_cut(record: p.Record) -> str:
    return json.dumps(record)


COMMAND = p.recording(RUN, "command")
STRANGE_CALL = b"cos\nsystem\nX\x0c\0\0\0touch CANARY\x85R"
SILENCE = {"id": "p", "type": "PaddingCut", "duration": 1.0, "sampling_rate": RATE, "feat_value": 0.0}
LAUGHS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 10)}]\n" for i in range(10))
ATTACKS = [
    Attack("code", "fairseq", "a pickle that calls", p.pickled(STRANGE_CALL), r"a\.pt"),
    Attack("code", "fairseq", "settings that call", p.fairseq({"conv_feature_layers": f"__import__('os').system('{RUN}')"}), r"a\.pt"),
    Attack("code", "fairseq", "a second pickle", p.zipped(("data.pkl", pickle.dumps({}, 2)), ("x/data.pkl", pickle.dumps(p.Calls(os.system, RUN), 2))), r"names posix\.system"),
    Attack("code", "state", "a pickle that calls", p.pickled(STRANGE_CALL), "step-00000001"),
    Attack("code", "config", "an object of YAML", f"a: !!python/object/apply:os.system ['{RUN}']\n", "is damaged"),
    Attack("code", "cut", "a command", a_cut(p.cut(COMMAND)), "missing"),
    Attack("code", "cut", "a URL", a_cut(p.cut(p.recording(f"pipe:{RUN}", "url"))), "missing"),
    Attack("code", "cut", "an impulse response", a_cut(p.cut(p.recording(transforms=[p.reverb(COMMAND)]))), "Reverb"),
    Attack("code", "cut", "a reference of a mixture", a_cut(p.mixed(p.track(), snr_reference=p.track(COMMAND))), "the type 'command'"),
    Attack("code", "cut", "a track of two types", a_cut(p.mixed({**p.track(), "cut": p.cut(COMMAND, type="PaddingCut")})), "."),
    Attack("code", "recording", "a format of another program", b"NIST_1A\n   1024\n" + b"x" * 2000, r"a\.sph"),
    Attack("bounds", "fairseq", "an object with a large number", p.pickled(b"Nr" + struct.pack("<I", 2**31 - 1)), r"a\.pt"),
    Attack("bounds", "fairseq", "a text longer than the file", p.pickled(b"X" + struct.pack("<I", 2**31 - 1)), r"a\.pt"),
    Attack("bounds", "fairseq", "deep tuples", p.pickled(b"(" * 10**5 + b"t" * 10**5), r"a\.pt"),
    Attack("bounds", "fairseq", "a tuple doubled 40 times", p.pickled(p.doubled(40)), r"a\.pt"),
    Attack("bounds", "fairseq", "settings tenfold", p.fairseq(p.tenfold(9)), "themselves, or too many"),
    Attack("bounds", "fairseq", "settings of themselves", p.fairseq(endless()), "themselves, or too many"),
    Attack("bounds", "fairseq", "10^5 brackets", p.fairseq({"conv_feature_layers": "(" * 10**5}), r"a\.pt"),
    Attack("bounds", "fairseq", "minus signs", p.fairseq({**SETTINGS, "latent_temp": "(" + "-" * 10**5 + "5,)"}), r"a\.pt"),
    Attack("bounds", "fairseq", "10^8 layers", p.fairseq({**SETTINGS, "encoder_layers": 10**8}), r"a\.pt"),
    Attack("bounds", "fairseq", "compressed entries", compressed, "entries are compressed or overlap"),
    Attack("bounds", "fairseq", "entries that overlap", overlapping, "entries are compressed or overlap"),
    Attack("bounds", "fairseq", "a file of holes", holes, "almost empty"),
    Attack("bounds", "fairseq", "weights of one storage", shared, r"a\.pt"),
    Attack("bounds", "fairseq", "a pipe", p.pipe, "not a regular file"),
    Attack("bounds", "hugging face", "10^8 layers", json.dumps({**HF, "num_hidden_layers": 10**8}), r"config\.json"),
    Attack("bounds", "hugging face", "a width of 10^12", json.dumps({**HF, "hidden_size": 10**12}), r"config\.json"),
    Attack("bounds", "hugging face", "nested", DEEP, r"config\.json"),
    Attack("bounds", "hugging face", "zeros", p.zeros, "not a regular file"),
    Attack("bounds", "safetensors", "a large header", struct.pack("<Q", 2**63) + b"{}", "cannot be read"),
    Attack("bounds", "safetensors", "a file of holes", holes_behind_a_header, "almost empty"),
    Attack("bounds", "state", "nested values", p.header({"__metadata__": {"values": DEEP}}), "RecursionError"),
    Attack("bounds", "weights", "a shape of 2^62", p.header(p.tensor([2**62], 0, 4), b"\0" * 4), "cannot be read"),
    Attack("bounds", "checkpoint", "nested", DEEP, r"checkpoint\.json"),
    Attack("bounds", "checkpoint", "a long number", f'{{"step": {LONG}}}', r"checkpoint\.json"),
    Attack("bounds", "config", "aliases of aliases", LAUGHS, "is damaged"),
    Attack("bounds", "config", "nested", "a: " + DEEP, "is damaged"),
    Attack("bounds", "config", "an infinite number", "format: 3\nseed: 1e999", "is damaged"),
    Attack("bounds", "values of a cut", "a day of silence", a_cut(p.mixed(p.track(), {"offset": 0.0, "cut": {**SILENCE, "duration": 1e5}})), "s of silence"),
    Attack("bounds", "values of a cut", "much silence in parts", a_cut(p.mixed(*[{"offset": 0.0, "cut": {**SILENCE, "duration": 1e4}}] * 4)), "samples, the most are"),
    Attack("bounds", "values of a cut", "a late track", a_cut(p.mixed(p.track(offset=1e9))), "'offset'"),
    Attack("bounds", "values of a cut", "1,001 tracks", a_cut(p.mixed(*[p.track()] * 1001)), "'tracks' is not a list of 1 to 1000"),
    Attack("bounds", "values of a cut", "a slow speed", a_cut(p.cut(p.recording(transforms=[p.speed(1e-6)]))), "'factor' is 1e-06"),
    Attack("bounds", "values of a cut", "an unknown transform", a_cut(p.cut(p.recording(transforms=[{"name": "Compress", "kwargs": {}}]))), "the transform 'Compress'"),
    Attack("bounds", "values of a cut", "10^9 channels", a_cut(p.cut(p.recording(channel_ids=[10**9]))), "the channels are"),
    Attack("bounds", "values of a cut", "a start of another type", a_cut(p.cut(start=True)), "'start'"),
    Attack("bounds", "recording", "a long header", p.long_wav(MOST_SAMPLES + 1), "too much to read at once[.] Cut it"),
    Attack("bounds", "recording", "a pipe", p.pipe, "regular"),
    Attack("bounds", "recording", "zeros", p.zeros, "regular"),
    Attack("bounds", "manifest", "nested", DEEP, r"m\.jsonl"),
    Attack("bounds", "manifest", "a file of holes", p.sparse, r"m\.jsonl"),
    Attack("bounds", "transcript", "zeros", p.zeros, "not a regular|are read below"),
    Attack("bounds", "transcript", "10 GB", p.sparse, "the most are"),
    Attack("bounds", "tokenizer", "a pipe", p.pipe, r"a\.model"),
    Attack("bounds", "tokenizer", "10 GB", p.sparse, r"a\.model"),
    Attack("bounds", "tokenizer", "rubbish", b"\x0a\xff\xff\xff\xff\x07" * 100, r"a\.model"),
    Attack("bounds", "variables", "a long number", LONG, "RANK"),
    Attack("privacy", "config", "a reference", "format: 3\nseed: 1\nmodel: {a: '${hydra:runtime.cwd}'}\n", "refers to more than"),
    Attack("privacy", "config", "a variable by another", "format: 3\nmodel: {a: '${oc.decode:${oc.env:HOME}}'}\n", "refers to more than"),
    Attack("privacy", "config", "a link", p.link, "link"),
    Attack("privacy", "state", "a link", p.link, "step-00000001|link"),
    Attack("privacy", "transcript", "a link", p.link, "transcripts are read below"),
    Attack("privacy", "transcript", "a linked folder", folder_link, "transcripts are read below"),
    Attack("privacy", "transcripts", "a link", p.link, "transcripts are read below"),
    Attack("privacy", "labels", "a link", p.link, "transcripts are read below"),
    Attack("terminal", "hosts of ssh", "an escape", ESCAPES, "."),
    Attack("terminal", "hosts of mpi", "no UTF-8", b"\xff\xfe\n", "utf-8"),
    Attack("terminal", "variables", "another digit", "\u00b2", "RANK"),
]  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_a_reader_refuses_in_one_line(attack: Attack, folder: Path) -> None:
    door = DOORS[attack.door]
    path = folder / door.file
    p.place(path, attack.payload)
    with pytest.raises((SpeechtrainError, OSError, Unusable, UnknownField), match=attack.words) as caught:
        door.read(path)
    line = one_line(str(caught.value))
    assert len(line) < 10_000
    assert escape_controls(line) == line
    assert PRIVATE not in line
    assert not (folder / CANARY).exists()


# Files of a run: a damaged one reads as nothing, so that a report shows the rest

RUN_FILES: dict[str, Callable[[Path], object]] = {
    "result.json": read_result,
    "run.json": read_about,
    "device.json": read_device,
    "metrics.jsonl": read_metrics,
    "skipped.jsonl": lambda run: SkipLog(str(run), 9, 1.0).refresh(),
    "checkpoints/best.json": read_best,
    "lock": lambda run: RunLock(run).acquire().release(),
}
DAMAGE: dict[str, p.Payload] = {
    "a pipe": p.pipe,
    "zeros": p.zeros,
    "10 GB": p.sparse,
    "nested": DEEP,
    "long": LONG,
}


def page_of(run: Path) -> str:
    """Return the page of a report, or the line that refuses it."""
    try:
        report([str(run), "--out", "page.html"])
    except RunError as error:
        return str(error)
    return Path("page.html").read_text()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", RUN_FILES)
def test_a_file_of_a_run_is_read_through_no_link(name: str, folder: Path) -> None:
    p.place(folder / name, p.link)
    try:
        found = str(RUN_FILES[name](folder))
    except (OSError, SpeechtrainError) as error:
        found = str(error)
    assert PRIVATE not in found
    assert PRIVATE not in page_of(folder)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_of_a_run_is_regular_and_small(damage: str, folder: Path) -> None:
    p.place(folder / "result.json", DAMAGE[damage])
    assert read_result(folder) is None
    assert "<!doctype html>" in page_of(folder)
    p.place(folder / "metrics.jsonl", DAMAGE[damage])
    assert re.search("metrics.jsonl|<!doctype html>", page_of(folder))


WRITES: dict[str, Callable[[Path], object]] = {
    "report.html": lambda run: report([str(run)]),
    "comparison.html": lambda run: report([str(run), str(run)]),
    "run.json": lambda run: write_json(run / "run.json", {}),
    "config.yaml": lambda run: write_text(run / "config.yaml", "seed: 2\n"),
    "metrics.jsonl": lambda run: Jsonl(str(run)).log("train", {"step": 1}),
    "output.log": lambda run: TextLog(run).log("warning", {"message": "slow"}),
    "skipped.jsonl": lambda run: SkipLog(str(run), 9, 1.0).add(Skip("a", "unreadable", "a.wav"), 9),
    "lock": lambda run: RunLock(run).acquire().release(),
    "tensorboard/.probe": lambda run: TensorBoard(str(run))._open(),
    "ranks/1/output.log": lambda run: _redirect_output(run / "ranks/1/output.log"),
    "agent.log": lambda run: supervise(["sh", "-c", "echo said >&2"], os.environ, run / "agent.log"),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_a_run_writes_goes_through_no_link(name: str, folder: Path, streams: None) -> None:
    own = p.home(folder)
    before = own.read_bytes()
    p.place(folder / name, lambda path: path.symlink_to(os.path.relpath(own, path.parent)))
    told = "a link"  # replaced, or refused in one line
    try:
        WRITES[name](folder)
    except (OSError, RunError) as error:
        told = str(error)
    assert "a link" in told
    assert own.read_bytes() == before


@pytest.mark.parametrize("name", ["checkpoints", "ranks", "tensorboard"])
def test_a_run_writes_into_no_folder_that_is_a_link(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(p.home(tmp_path).parent)
    with pytest.raises(RunError, match=rf"{name} is a link\. Remove it"):
        RunLock(run).acquire()
