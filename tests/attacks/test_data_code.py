"""Manifests and names of recordings that try to run code: shell lines, URLs, impulse responses, fallbacks."""

# ruff: noqa: E501 - tables of cases

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import soundfile

from .data import RATE, TONE, Place, Record, convert, evaluate, prepare, train
from .forks import Forks, faults

SPH = b"NIST_1A\n   1024\n" + b"x" * 2000
RUN = "touch CANARY"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "place")


def reverb(rir: object, **more: object) -> Record:
    return {"name": "ReverbWithImpulseResponse", "kwargs": {"rir": rir, "rir_channels": [0], **more}}


def bare(cut: Record) -> Record:
    return {key: value for key, value in cut.items() if key != "type"}


def evil(place: Place, url: bool = False, **more: object) -> Record:
    source, kind = (f"pipe:{place.command}", "url") if url else (place.command, "command")
    return place.recording(source, kind, **more)


def named(place: Place, source: str) -> Record:
    """A command that is the name of a real recording, for checks that look whether the file exists."""
    folder = place.folder / f"y;{RUN};"
    folder.mkdir()
    soundfile.write(folder / "a.wav", TONE, RATE)
    return place.recording(f"{place.folder}/y;{RUN};/a.wav", source)


CUTS: dict[str, Callable[[Place], Record]] = {
    "a command": lambda p: p.cut(evil(p)),
    "a URL that is a pipe": lambda p: p.cut(evil(p, url=True)),
    "a file's URL": lambda p: p.cut(p.recording("file:///etc/passwd", "url")),
    "memory": lambda p: p.cut(p.recording("UklGRg==", "memory")),
    "shar": lambda p: p.cut(p.recording(p.command, "shar")),
    "a type in capitals": lambda p: p.cut(p.recording(p.command, "COMMAND")),
    "a type in a list": lambda p: p.cut({**p.recording(), "sources": [{"type": ["command"], "source": "x"}]}),
    "a file of two, the other a command": lambda p: p.cut(
        {**p.recording(), "sources": p.recording()["sources"] + evil(p)["sources"]}
    ),
    "one file that is a pipe's name": lambda p: p.cut(p.recording(f"pipe:{p.command}")),
    "one file that is a shell's pipe": lambda p: p.cut(p.recording(f"{p.command}|")),
    "a response by command": lambda p: p.cut(p.recording(transforms=[reverb(evil(p, id="i"))])),
    "a response by URL": lambda p: p.cut(p.recording(transforms=[reverb(evil(p, url=True))])),
    "a response that is a cut": lambda p: p.cut(p.recording(transforms=[reverb(p.cut(evil(p)))])),
    "a response in a response": lambda p: p.cut(
        p.recording(transforms=[reverb(p.recording(transforms=[reverb(evil(p))]))])
    ),
    "a response behind a known transform": lambda p: p.cut(
        p.recording(transforms=[{"name": "Speed", "kwargs": {"factor": 0.9}}, reverb(evil(p))])
    ),
    "a response among known arguments": lambda p: p.cut(
        p.recording(transforms=[{"name": "Volume", "kwargs": {"factor": 1.0, "rir": evil(p)}}])
    ),
    "transforms that are a mapping": lambda p: p.cut(p.recording(transforms={"0": reverb(evil(p))})),
    "a track": lambda p: p.mixed(p.track(), p.track(evil(p), snr=10.0)),
    "a track by URL": lambda p: p.mixed(p.track(), p.track(evil(p, url=True))),
    "a reference": lambda p: p.mixed(p.track(), p.track(snr=10.0), snr_reference=p.track(evil(p))),
    "a reference that is a cut": lambda p: p.mixed(p.track(), snr_reference=p.cut(evil(p))),
    "a mixture's response": lambda p: p.mixed(p.track(), transforms=[reverb(evil(p))]),
    "a track's response": lambda p: p.mixed(p.track(p.recording(transforms=[reverb(evil(p))]))),
    "a track of two types, silent inside": lambda p: p.mixed(
        p.track(), {"type": "MonoCut", "offset": 0.0, "cut": {**p.cut(named(p, "command")), "type": "PaddingCut"}}
    ),
    "a track of two types, silent outside": lambda p: p.mixed(
        p.track(), {"type": "PaddingCut", "offset": 0.0, "cut": {**p.cut(named(p, "command")), "sampling_rate": RATE}}
    ),
    "a track of two types, mixed inside": lambda p: p.mixed(
        p.track(),
        {"type": "MonoCut", "offset": 0.0, "cut": {**p.cut(), "type": "MixedCut", "tracks": [p.track(evil(p))]}},
    ),
    "a track of two types, mixed inside, no tracks": lambda p: p.mixed(
        {"type": "MonoCut", "offset": 0.0, "cut": {**p.cut(), "type": "MixedCut"}}
    ),
    "a track without a type": lambda p: p.mixed(p.track(), {"offset": 0.0, "cut": p.cut(evil(p))}),
    "a mixture in a mixture": lambda p: p.mixed(
        {"type": "MixedCut", "offset": 0.0, "cut": bare(p.mixed(p.track(evil(p))))}
    ),
    "a multi-channel cut": lambda p: p.cut(evil(p, channel_ids=[0, 1]), type="MultiCut", channel=[0, 1]),
    "features": lambda p: p.cut(features={"type": "fbank", "storage_type": "lilcom_url", "storage_path": f"pipe:{RUN}"}),
    "a custom recording": lambda p: p.cut(custom={"x": evil(p)}),
    "a custom array": lambda p: p.cut(
        custom={"x": {"array": {"storage_type": "numpy_files", "storage_path": "x", "storage_key": "y", "shape": [1]}}}
    ),
    "a target": lambda p: p.cut(_target_="os.system", _args_=[RUN]),
    "a command in a supervision": lambda p: p.cut(
        supervisions=[{"id": "s", "text": "one", "start": 0, "duration": 2, "recording": evil(p), "custom": evil(p)}]
    ),
    "a known key twice": lambda p: {**p.cut(), "sources": evil(p)["sources"], "recordings": evil(p)},
}  # fmt: skip
HARMLESS = ("features", "a custom recording", "a custom array", "a target", "a command in a supervision",
            "a known key twice", "a response among known arguments")  # fmt: skip
"""What lhotse itself would not run: the audio is read as if the keys were not there."""


@pytest.mark.parametrize("name", CUTS)
def test_no_part_of_a_manifest_runs_code(forks: Forks, place: Place, name: str) -> None:
    path = place.lines(CUTS[name](place))
    ended = prepare(forks, place, path, cwd=place.folder)
    assert faults(ended, refuses=name not in HARMLESS, canaries=[place.canary]) == []
    written = place.folder / "out" / "o.jsonl"
    if written.exists():  # what it has written is again a stranger's manifest
        again = prepare(forks, place, written, cwd=place.folder)
        assert faults(again, refuses=name not in HARMLESS, canaries=[place.canary]) == []


@pytest.mark.ci_share
@pytest.mark.parametrize(
    "name", ["a response by command", "a reference", "a track of two types, silent inside"]
)
def test_no_command_runs_what_a_manifest_names(forks: Forks, place: Place, good: Path, name: str) -> None:
    path = place.lines(CUTS[name](place))
    for ended in (
        evaluate(forks, place, good, path, cwd=place.folder),
        convert(forks, place, path, cwd=place.folder),
        train(forks, place, path, cwd=place.folder),
    ):
        assert faults(ended, refuses=True, canaries=[place.canary]) == []


@pytest.mark.ci_share
@pytest.mark.parametrize("kind", ["command", "url", "response", "bound twice"])
def test_no_recording_manifest_runs_code(forks: Forks, place: Place, kind: str) -> None:
    held = {
        "command": evil(place),
        "url": evil(place, url=True),
        "response": place.recording(transforms=[reverb(evil(place))]),
        "bound twice": place.recording(transforms=[reverb(place.cut(evil(place)))]),
    }[kind]
    recordings = place.lines(held, name="recordings.jsonl")
    spoken = {"id": "s", "recording_id": "r", "start": 0, "duration": 2, "channel": 0, "text": "one"}
    supervisions = place.lines(spoken, name="supervisions.jsonl")
    for sources in ([recordings], [recordings, supervisions], [f"{recordings},{supervisions}"]):
        ended = prepare(forks, place, *sources, cwd=place.folder)
        assert faults(ended, refuses=True, canaries=[place.canary]) == []


@pytest.mark.parametrize("name", ["a response by command", "a reference", "a command"])
def test_a_strangers_run_names_a_manifest(forks: Forks, place: Place, good: Path, name: str) -> None:
    """Plain ``speechtrain evaluate RUN``: the set stands in the run's config.yaml."""
    import shutil

    run_dir = place.folder / "run"
    shutil.copytree(good, run_dir)
    import yaml

    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    manifest = str(place.lines(CUTS[name](place)))
    config["data"] = {
        "_target_": "speechtrain.data.module.SpeechData", "train": manifest, "valid": {"x": manifest},
        "workers": 0, "cache": str(place.folder / "cache"),
    }  # fmt: skip
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    ended = forks.run("evaluate", run_dir, cwd=place.folder)
    assert faults(ended, refuses=True, canaries=[place.canary]) == []


def test_an_index_that_another_wrote_runs_nothing(forks: Forks, place: Place, good: Path) -> None:
    """The cuts of a cache are checked again where their audio is read."""
    quiet = {"name": "Volume", "kwargs": {"factor": 0.5}}
    path = place.lines(place.cut(place.recording(transforms=[quiet])), name="m.jsonl")
    pair = place.lines(place.recording(transforms=[quiet]), name="recordings.jsonl")
    assert faults(evaluate(forks, place, good, path), refuses=False) == []
    assert faults(evaluate(forks, place, good, pair), refuses=False) == []
    stored = list((place.folder / "cache").rglob("cuts-*.jsonl"))
    assert stored
    for file in stored:
        cut = json.loads(file.read_text())
        cut["recording"]["transforms"] = [reverb(evil(place))]
        file.write_text(json.dumps(cut) + "\n")
    ended = evaluate(forks, place, good, pair, cwd=place.folder)
    assert faults(ended, canaries=[place.canary]) == []


NAMES = {
    "semicolon": f"x;{RUN};", "dollar": f"x$({RUN})", "backtick": f"x`{RUN}`", "amp": f"x&{RUN}&",
    "pipe": f"x|{RUN}|", "newline": f"x\n{RUN}\n", "redirect": "x>CANARY ", "quote": f"x';{RUN};'",
    "quotes": f'x";{RUN};"', "option": "-o CANARY", "url": f"pipe:{RUN}", "brace": "x${IFS}{a,b}",
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["sph", "SPH", "opus", "wav", "m4a", "mp3", "flac"])
@pytest.mark.parametrize("kind", NAMES)
def test_no_name_of_a_recording_is_a_command(forks: Forks, place: Place, kind: str, suffix: str) -> None:
    corpus = place.folder / "corpus"
    corpus.mkdir()
    for content in (SPH, b"rubbish" * 200):
        (corpus / f"{NAMES[kind]}.{suffix}").write_bytes(content)
        legacy = {"LHOTSE_LEGACY_OPUS_LOADING": "1"}
        ended = prepare(forks, place, corpus, cwd=corpus, environment=legacy)
        assert faults(ended, refuses=True, canaries=[corpus / "CANARY", place.canary]) == []
    assert os.listdir(corpus) == [f"{NAMES[kind]}.{suffix}"]


def test_no_name_is_a_command_in_any_format_or_command(forks: Forks, place: Place, good: Path) -> None:
    folder = place.folder / f"d;{RUN};"
    folder.mkdir()
    (folder / "plain.sph").write_bytes(SPH)
    path = f"{folder}/x;{RUN};.sph"
    Path(path).write_bytes(SPH)
    array = [{"transcript": "one", "files": [{"fname": path, "duration": 2.0, "speed": 1}]}]
    sources = [
        folder,
        place.lines(place.nemo(audio_filepath=path), name="nemo.jsonl"),
        place.file("mlperf.json", json.dumps([{**array[0], "original_duration": 2.0}])),
        place.file("fairseq.tsv", f"{folder}\nx;{RUN};.sph\t32000\n"),
        place.lines(place.cut(place.recording(path)), name="cuts.jsonl"),
        place.lines(place.cut(place.recording(path), start=0.5), name="offset.jsonl"),
    ]
    canaries = [place.canary, folder / "CANARY"]
    for source in sources:
        ended = prepare(forks, place, source, cwd=place.folder)
        assert faults(ended, refuses=True, canaries=canaries) == [], source
    ended = forks.run("transcribe", good, path, cwd=place.folder)
    assert faults(ended, refuses=True, canaries=canaries) == []
    for act in (train, convert):
        assert faults(act(forks, place, folder, cwd=place.folder), refuses=True, canaries=canaries) == []
    assert (
        faults(evaluate(forks, place, good, folder, cwd=place.folder), refuses=True, canaries=canaries) == []
    )
