"""A run directory and a corpus of a stranger: no file of the user is changed, shown or waited for."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speechtrain.batch import Skip
from speechtrain.checkpoint.whole import Checkpointer
from speechtrain.commands.report import run as report
from speechtrain.config.resolved import load
from speechtrain.data.skips import SkipLog
from speechtrain.data.sources import open_source
from speechtrain.devices.hpu import _write_operations
from speechtrain.errors import DataError, RunError, SpeechtrainError
from speechtrain.files import MOST_BYTES, append_line, atomic, read_text, write_json, write_text
from speechtrain.launcher import Job, forwarded_environment, holds_secret, is_secret
from speechtrain.rank.main import _redirect_output
from speechtrain.run_directory import (
    RunLock,
    read_about,
    read_best,
    read_device,
    read_failure,
    read_metrics,
    read_result,
)
from speechtrain.supervision.supervise import supervise
from speechtrain.tracking.console import TextLog
from speechtrain.tracking.jsonl import Jsonl
from speechtrain.tracking.tensorboard import TensorBoard

PRIVATE = "PRIVATE-KEY-OF-THE-USER\n"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the user's, outside of the run."""
    path = tmp_path / "home" / "id_rsa"
    path.parent.mkdir()
    path.write_text(PRIVATE)
    return path


@pytest.fixture
def streams() -> Iterator[None]:
    """Brings standard output and error back, which a rank redirects to its file."""
    kept = {number: os.dup(number) for number in (1, 2)}
    yield
    for number, stream in kept.items():
        os.dup2(stream, number)
        os.close(stream)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 1\n")
    write_json(folder / "result.json", {"status": "finished"})
    return folder


# --- what is written ----------------------------------------------------------------------------

WRITES: dict[str, Callable[[Path], object]] = {
    "report.html": lambda run: report([str(run)]),
    "comparison.html": lambda run: report([str(run), str(run)]),
    "run.json": lambda run: write_json(run / "run.json", {}),
    "config.yaml": lambda run: write_text(run / "config.yaml", "seed: 2\n"),
    "metrics.jsonl": lambda run: Jsonl(str(run)).log("train", {"step": 1}),
    "output.log": lambda run: TextLog(run).log("warning", {"message": "slow"}),
    "skipped.jsonl": lambda run: SkipLog(str(run), 9, 1.0).add(Skip("a", "unreadable", "a.wav"), 9),
    "lock": lambda run: RunLock(run).acquire().release(),
    "tensorboard/.probe": lambda run: TensorBoard(str(run))._probe(),
    "ranks/1/output.log": lambda run: _redirect_output(run / "ranks/1/output.log"),
    "agent.log": lambda run: supervise(
        ["sh", "-c", "echo said >&2"], os.environ, run / "agent.log", grace=1.0
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_a_run_writes_goes_through_no_link(
    name: str, run_dir: Path, secret: Path, streams: None
) -> None:
    (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).symlink_to(os.path.relpath(secret, (run_dir / name).parent))
    before = secret.stat()
    told = "a link"  # replaced, or refused in one line
    try:
        WRITES[name](run_dir)
    except (OSError, RunError) as error:
        told = str(error)
    assert "a link" in told
    assert secret.read_text() == PRIVATE
    assert secret.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("name", [name for name in WRITES if not name.startswith("comparison")])
def test_the_same_writes_work_in_a_run_that_is_a_link(
    name: str, run_dir: Path, tmp_path: Path, streams: None
) -> None:
    (tmp_path / "latest").symlink_to(run_dir)
    WRITES[name](tmp_path / "latest")
    assert (run_dir / name).is_file() or name.endswith(".probe")


@pytest.mark.parametrize(
    "name", ["checkpoints", "ranks", "stuck", "tensorboard", "checkpoints/step-00000001"]
)
@pytest.mark.parametrize("target", ["a folder", "nothing"])
def test_a_run_writes_into_no_folder_that_is_a_link(
    name: str, target: str, run_dir: Path, secret: Path
) -> None:
    (run_dir / name).parent.mkdir(exist_ok=True)
    (run_dir / name).symlink_to(secret.parent if target == "a folder" else secret.parent / "later")
    with pytest.raises(RunError, match=rf"{name} is a link\. Remove it"):
        RunLock(run_dir).acquire()


def test_a_page_goes_where_the_user_says(run_dir: Path, tmp_path: Path, secret: Path) -> None:
    (tmp_path / "own.html").symlink_to(secret)
    report([str(run_dir), "--out", str(tmp_path / "own.html")])
    assert secret.read_text().startswith("<!doctype html>")


def test_a_file_for_the_owner_is_for_the_owner_from_its_first_byte(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with atomic(tmp_path / "a", private=True) as temporary:
            assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        with atomic(tmp_path / "b") as temporary:
            assert stat.S_IMODE(temporary.stat().st_mode) == 0o644
    finally:
        os.umask(before)


def test_a_file_of_operations_has_a_new_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = _write_operations("OPS", ["mm", "linear"]), _write_operations("OPS", ["mm"])
    assert first != second
    assert Path(first).read_text() == "mm\nlinear\n"
    assert stat.S_IMODE(Path(first).stat().st_mode) == 0o600


# --- what is read -------------------------------------------------------------------------------


def fifo(path: Path, secret: Path) -> None:
    os.mkfifo(path)


def zeros(path: Path, secret: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path, secret: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 * 2**30)


def link(path: Path, secret: Path) -> None:
    secret.write_text(
        json.dumps({"status": "running", "stolen": PRIVATE, "event": "warning", "message": PRIVATE})
    )
    path.symlink_to(secret)


HOSTILE = [fifo, zeros, sparse, link]
READS: dict[str, Callable[[Path], object]] = {
    "result.json": lambda run: (read_result(run), read_failure(run)),
    "run.json": read_about,
    "device.json": read_device,
    "config.yaml": lambda run: load(run / "config.yaml"),
    "metrics.jsonl": lambda run: read_metrics(run),
    "skipped.jsonl": lambda run: SkipLog(str(run), 9, 1.0).refresh(),
    "checkpoints/step-00000001/checkpoint.json": lambda run: Checkpointer(run).weights(),
    "checkpoints/best.json": lambda run: read_best(run),
    "lock": lambda run: RunLock(run).acquire().release(),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("name", READS)
def test_a_file_of_a_run_is_regular_small_and_no_link(
    name: str,
    hostile: Callable[[Path, Path], None],
    run_dir: Path,
    secret: Path,
) -> None:
    (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
    (run_dir / name).unlink(missing_ok=True)
    hostile(run_dir / name, secret)
    try:
        found = READS[name](run_dir)
    except (OSError, SpeechtrainError) as error:
        found = str(error)
    assert "stolen" not in str(found)
    page = run_dir / "out.html"
    try:
        report([str(run_dir), "--out", str(page)])
    except RunError as error:
        page.write_text(str(error))
    assert "PRIVATE" not in page.read_text()
    assert "stolen" not in page.read_text()


def test_a_long_record_is_read_by_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"event": "train", "step": step, "text": "x" * 2000}) for step in range(20_000)]
    path.write_text("\n".join(rows))  # more than one whole file may have
    assert path.stat().st_size > 2 * MOST_BYTES
    assert len(read_metrics(tmp_path).rows) == 20_000
    with pytest.raises(OSError, match="the most are"):
        read_text(path)
    append_line(path, b"{}")
    assert path.read_bytes().endswith(b"}\n{}\n")


# --- transcripts --------------------------------------------------------------------------------


def nemo(folder: Path) -> Path:
    line = {"audio_filepath": "a.wav", "duration": 1.0, "text_filepath": "a.txt"}
    (folder / "train.jsonl").write_text(json.dumps(line) + "\n")
    return folder / "train.jsonl"


def fairseq(folder: Path) -> Path:
    (folder / "train.tsv").write_text(f"{folder}\na.wav\t16000\n")
    (folder / "train.wrd").symlink_to("a.txt")
    return folder / "train.tsv"


def librispeech(folder: Path) -> Path:
    (folder / "a.trans.txt").symlink_to("a.txt")
    return folder


CORPORA: list[Callable[[Path], Path]] = [nemo, fairseq, librispeech, lambda folder: folder]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder whose audio is a link into another place."""
    (tmp_path / "far").mkdir()
    soundfile.write(tmp_path / "far" / "a.wav", np.zeros(16_000, np.float32), 16_000)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.wav").symlink_to(tmp_path / "far" / "a.wav")
    return tmp_path / "corpus"


def texts_of(source: Path) -> list[str]:
    entries = open_source(str(source)).entries()  # type: ignore[attr-defined]
    return [" ".join(s["text"] for s in entry.cut["supervisions"]) for entry in entries]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", CORPORA)
@pytest.mark.parametrize(
    "hostile", [*HOSTILE, lambda path, secret: path.symlink_to("/proc/self/environ"), pytest.param(None)]
)
def test_a_transcript_is_a_small_file_of_its_corpus(
    kind: Callable[[Path], Path], hostile: Callable[[Path, Path], None] | None, corpus: Path, secret: Path
) -> None:
    source = kind(corpus)
    if hostile is None:  # a folder on the way is a link
        (corpus / "sub").symlink_to(secret.parent)
        (corpus / "a.txt").symlink_to("sub/id_rsa")
    else:
        hostile(corpus / "a.txt", secret)
    if kind is fairseq and hostile is sparse:
        return  # a list is read by lines
    try:
        told = f"{texts_of(source)}: a.txt"
    except DataError as error:
        told = str(error)
    reasons = "transcripts are read below|not a regular|the most are"
    assert re.match(rf"\[''\]: |/.*(a\.txt|train\.wrd|a\.trans\.txt).*({reasons})", told), told


@pytest.mark.parametrize("kind", CORPORA)
def test_links_that_stay_in_the_corpus_are_followed(kind: Callable[[Path], Path], corpus: Path) -> None:
    (corpus / "texts").mkdir()
    (corpus / "texts" / "1").write_text("a one two" if kind is librispeech else "one two")
    (corpus / "a.txt").symlink_to("texts/1")
    source = kind(corpus)
    assert texts_of(source) == ["one two"]
    (corpus.parent / "linked").symlink_to(corpus)
    assert texts_of(corpus.parent / "linked" / source.relative_to(corpus)) == ["one two"]


def test_a_manifest_that_is_a_link_has_its_transcripts_where_its_file_lies(corpus: Path) -> None:
    (corpus / "a.txt").write_text("one two")
    (corpus.parent / "own").mkdir()
    for name in (fairseq(corpus).name, "train.wrd"):
        (corpus.parent / "own" / name).symlink_to(corpus / name)
    assert texts_of(corpus.parent / "own" / "train.tsv") == ["one two"]


# --- secrets ------------------------------------------------------------------------------------

NAMES = ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MYSQL_PWD", "GH_PAT", "SSH_PASSPHRASE", "PROXY_AUTH", "BEARER"]
NAMES += ["JWT", "SESSION_COOKIE", "SENTRY_DSN", "DATABASE_URL", "DB_PASSWORD", "GH_PAT_2", "MY_AUTH_HEADER"]
HARMLESS = [
    "PATH",
    "PYTHONPATH",
    "PWD",
    "OLDPWD",
    "TOKENIZERS_PARALLELISM",
    "AUTHOR",
    "GITHUB_PATH",
    "HF_HOME",
]


def test_secrets_are_known_by_their_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*NAMES, *HARMLESS):
        monkeypatch.setenv(name, "hush")
    forwarded = forwarded_environment(Job(tmp_path / "config.yaml", tmp_path), ["*"])
    assert not set(NAMES) & set(forwarded)
    assert set(HARMLESS) <= set(forwarded)
    assert [is_secret(name) for name in ("tokenizer", "token")] == [False, True]


@pytest.mark.parametrize(
    ("text", "is_held"),
    [
        ("x:\n  token: abc\n", True),
        ('{"argv": ["x.api_key=abc"]}', True),
        ('{"argv": ["x=my_token=abc"]}', True),
        ("x" * 10**6, False),
        ("{'written': {'tracking/own': 'password: abc'}}", True),
        ("url: postgres://me:abc@host/db\n", True),
        ("token: ${oc.env:TOKEN}\n", False),
        ("token: null\n", False),
        ("token: '${ oc.env:TOKEN}'\n", False),
        ("tokenizer: letters\nenv_from_secrets: []\nurl: http://host:80/a@b\n", False),
    ],
    ids=range(10),
)
@pytest.mark.timeout(60)
def test_a_text_with_a_secret_is_recognised(text: str, is_held: bool) -> None:
    assert holds_secret(text) is is_held


def test_a_page_with_a_secret_is_for_its_owner(run_dir: Path) -> None:
    report([str(run_dir)])
    assert stat.S_IMODE((run_dir / "report.html").stat().st_mode) & 0o077
    write_json(run_dir / "run.json", {"overrides": [], "argv": ["x.token=abc"]})
    report([str(run_dir)])
    assert stat.S_IMODE((run_dir / "report.html").stat().st_mode) == 0o600
