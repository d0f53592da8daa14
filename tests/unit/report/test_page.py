"""The report: right figures, nothing loaded from elsewhere, nothing unescaped, no run that breaks it."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from speechtrain import run_directory
from speechtrain.commands._cli import exit_code_of
from speechtrain.commands.report import run as report
from speechtrain.errors import ConfigError, RunError
from speechtrain.report import page as page_module
from speechtrain.report.chart import Chart, Line
from speechtrain.report.page import align, page
from speechtrain.report.run import Curve, differing_keys, names_of, read_run, runs_in
from speechtrain.tracking.jsonl import Jsonl

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that tags balance, and collects what a test asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data + " "

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


def _write(folder: Path, *events: tuple[str, dict[str, Any]], **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tracker = Jsonl(str(folder))
    for event, values in events:
        tracker.log(event, values)
    tracker.close()
    for name, content in files.items():
        path = folder / {"result": "result.json", "run": "run.json", "config": "config.yaml"}.get(name, name)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def _events(steps: int = 40, wer: float = 0.0321, loss: float = 1.0) -> list[tuple[str, dict[str, Any]]]:
    events: list[tuple[str, dict[str, Any]]] = [("start", {"parameters": 480029, "steps": 40})]
    for step in range(1, steps + 1):
        figures = {"loss": loss / step, "lr": 1e-3, "grad_norm": 2.0, "utterances_per_s": 128.0}
        more = {"audio_s_per_s": 210.0, "data_wait": 0.05, "memory_mib": 700.0, "eta_s": 1.0}
        events.append(("train", {"step": step, "steps": 40, "epoch": step / 10, **figures, **more}))
        if step % 20 == 0:
            for name, factor in (("test", 1.0), ("voices", 2.0)):
                rate = wer * factor * 40 / step
                events.append(
                    ("valid", {"step": step, "set": name, "seconds": 1.0, "wer": rate, "loss": 2.0})
                )
    rows = [
        {"id": "a-1", "reference": "one two three", "hypothesis": "one too three four"},
        {"id": "a-2", "reference": "five six", "hypothesis": "five"},
    ]
    events.append(("examples", {"step": steps, "set": "test", "rows": rows}))
    return events


def _device(computes: str) -> str:
    record = {"device": "cpu", "chip": "Xeon", "precision": "auto", "policy": {}, "computes": computes}
    return json.dumps(record)


def _whole_run(folder: Path, **changes: Any) -> Path:
    skipped = [{"id": f"cut-{i}", "reason": "unreadable", "detail": "lost sync"} for i in range(7)]
    lines = "".join(json.dumps(row) + "\n" for row in [*skipped, skipped[0], {"id": "x", "reason": "empty"}])
    return _write(
        folder,
        *_events(**changes),
        ("warning", {"message": "slow disk"}),
        ("warning", {"message": "slow disk"}),
        result={
            "status": "finished",
            "metric": 0.03,
            "metrics": {"test/wer": 0.0321},
            "steps": 40,
            "wall_s": 754.2,
        },
        run={
            "argv": ["-m", "seed=1,2"],
            "overrides": ["seed=1"],
            "git": {"commit": "abc123", "dirty": True},
            "versions": {"torch": "2.13.0"},
            "seed": 7,
            "device": "cpu",
            "host": "box",
        },
        config="seed: 7\nprecision:\n  _target_: speechtrain.precision.Auto\noptimizer:\n  lr: 0.004\n",
        **{"skipped.jsonl": lines + '{"id": "torn', "device.json": _device("bf16 lstm=loop")},
    )


def _page(*folders: Path) -> Page:
    return Page(page([read_run(folder) for folder in folders]))


def test_a_finished_run(tmp_path: Path) -> None:
    words = _page(_whole_run(tmp_path / "rnnt-digits")).words
    for fact in (
        "rnnt-digits finished",
        "WER test 3.21 %",
        "WER voices 6.42 %",
        "steps 40",
        "wall time 0:12:34",
        "throughput 128 utt/s 210 audio s/s",
        "parameters 480 k 480,029",
        "device cpu bf16 box",
        "slow disk × 2",
        "Skipped recordings 8 in all",
        "unreadable 7 cut-0 lost sync",
        "and 2 more in skipped.jsonl",
        "command speechtrain train -m seed=1,2 overrides seed=1 seed 7",
        "abc123 with uncommitted changes",
        "torch 2.13.0",
        "lr: 0.004",
    ):
        assert fact in words
    for title in (
        "Loss",
        "WER %",
        "Learning rate",
        "Gradient norm",
        "Throughput",
        "Waiting for data",
        "Memory",
    ):
        assert title in words


def test_every_chart_says_its_values_to_those_who_cannot_see_it(tmp_path: Path) -> None:
    labels = [a["aria-label"] or "" for _, a in _page(_whole_run(tmp_path)).tags if a.get("role") == "img"]
    test, voices = "test from 6.42 to 3.21 %, lowest 3.21", "voices from 12.84 to 6.42 %, lowest 6.42"
    assert f"WER against the step: {test}; {voices}" in labels
    assert len(labels) == 8


@pytest.mark.slow
def test_page_bounds_the_charts_of_thousands_of_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert page_module._MAX_CHARTS <= 200, "each takes 5 ms"
    monkeypatch.setattr(page_module, "_MAX_CHARTS", 20)
    run_dir = _whole_run(tmp_path)
    row = {"event": "valid", "time": 0.0, "step": 1, "set": "a", **{f"m{i}": 1.0 for i in range(2000)}}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    charts = [a for _, a in Page(page([read_run(run_dir)])).tags if a.get("role") == "img"]
    assert len(charts) == 20


def test_errors_of_transcripts_are_marked(tmp_path: Path) -> None:
    text = page([read_run(_whole_run(tmp_path))])
    assert re.search(r'class="word replace"><span[^>]*>two</span><span[^>]*>too</span>', text)
    assert re.search(r'class="word insert"><span[^>]*>·</span><span[^>]*>four</span>', text)
    assert re.search(r'class="word delete"><span[^>]*>six</span><span[^>]*>·</span>', text)
    words = Page(text).words
    assert "2 of 3 words" in words
    assert "1 of 2 words" in words


def test_nothing_is_loaded_from_anywhere(tmp_path: Path) -> None:
    text = page([read_run(_whole_run(tmp_path))])
    parsed = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & {
        tag for tag, _ in parsed.tags
    }
    for _, attributes in parsed.tags:
        assert not [a for a in attributes if a in ("src", "srcset") or a.startswith("on")]
        for name in ("href", "xlink:href"):  # a drawing's own markers
            assert (attributes.get(name) or "#").startswith("#")
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/(2000/svg|1999/xlink)\")", text)
    assert any("default-src 'none'" in (a.get("content") or "") for _, a in parsed.tags)


NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;<!--"


def test_everything_is_escaped(tmp_path: Path) -> None:
    folder = _write(
        tmp_path / "<b>run",
        ("start", {"parameters": 1}),
        ("train", {"step": 1, "loss": 1.0, NASTY: 2.0}),
        ("valid", {"step": 1, "set": NASTY, "wer": 0.5, NASTY: 1.0}),
        (
            "examples",
            {
                "step": 1,
                "set": NASTY,
                "rows": [{"id": NASTY, "reference": NASTY, "hypothesis": NASTY + " x"}],
            },
        ),
        ("warning", {"message": NASTY}),
        result={"status": NASTY, "error": NASTY, "metrics": {NASTY: NASTY}},
        run={
            "argv": [NASTY],
            "overrides": [NASTY],
            "git": {"commit": NASTY},
            "versions": {NASTY: NASTY},
            "seed": NASTY,
            "device": NASTY,
            "host": NASTY,
            "platform": NASTY,
        },
        config=NASTY,
        **{"skipped.jsonl": json.dumps({"id": NASTY, "reason": NASTY, "detail": NASTY})},
    )
    other = _write(tmp_path / "other", ("start", {}), config=f"a: {json.dumps(NASTY)}")
    for parsed in (_page(folder), _page(folder, other)):
        assert not {"script", "img"} & {tag for tag, _ in parsed.tags}
        assert parsed.text.count("alert(1)") >= 10


def test_a_run_in_progress(tmp_path: Path) -> None:
    folder = _write(tmp_path, *_events(steps=30), config="seed: 1\n")
    assert "no result yet" in _page(folder).words
    (folder / "lock").write_text(f"pid {os.getpid()} on {platform.node()}\n")
    words = _page(folder).words
    assert "in progress" in words
    assert "steps 30 of 40" in words
    assert "0:00:01 to go" in words


@pytest.mark.slow
def test_a_run_whose_process_is_gone(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = _write(tmp_path, *_events(), lock=f"pid {gone.pid} on {platform.node()}\n")
    assert "stopped without a result" in _page(folder).words
    (folder / "lock").write_text(f"pid {gone.pid} on another-host\n")
    assert "no result yet" in _page(folder).words


def test_wall_time_without_a_result_leaves_out_the_pause(tmp_path: Path) -> None:
    steps = {"train": 1, "resume": 1, "valid": 2}
    times = [("start", 100), ("train", 160), ("start", 9000), ("resume", 9001), ("valid", 9030)]
    lines = [json.dumps({"event": event, "time": at, "step": steps.get(event)}) for event, at in times]
    assert read_run(_write(tmp_path, **{"metrics.jsonl": "\n".join(lines)})).wall_s == 60 + 30


def test_values_that_are_not_finite_are_gaps_and_counted(tmp_path: Path) -> None:
    events = [("train", {"step": s, "loss": float("nan") if s == 7 else 1.0 + s % 3}) for s in range(1, 31)]
    text = page([read_run(_write(tmp_path, *events, config=""))])
    assert "1 value not finite" in text
    faint = [a["d"] or "" for _, a in Page(text).tags if "stroke-opacity" in (a.get("style") or "")]
    assert [path.count("M") for path in faint] == [2]


def test_several_runs(tmp_path: Path) -> None:
    best = _whole_run(tmp_path / "sweep" / "0", wer=0.01)
    worse = _whole_run(tmp_path / "sweep" / "1", wer=0.02)
    (worse / "config.yaml").write_text("seed: 7\nrun_dir: elsewhere\noptimizer:\n  lr: 0.1\n")
    text = page([read_run(best), read_run(worse)])
    parsed = Page(text)
    assert "2 runs compared" in parsed.words
    assert '<td class="num best">1.00 %</td>' in text
    assert "0 finished 1.00 % 2.00 % 40 0:12:34 128 480 k cpu bf16" in parsed.words
    assert "optimizer.lr" in parsed.words
    assert "run_dir" not in re.findall(r'<th scope="col">([^<]*)</th>', text)
    (label,) = [
        a["aria-label"] or "" for _, a in parsed.tags if (a.get("aria-label") or "").startswith("WER")
    ]
    assert re.findall(r"[:;] (.*?) from", label) == [
        f"{i}, {name}" for i in "01" for name in ("test", "voices")
    ]


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    runs = [read_run(_write(tmp_path / name, config="")) for name in ("a/x", "b/x", "b/y")]
    assert names_of(runs) == ["a/x", "b/x", "b/y"]
    assert names_of(runs[1:]) == ["x", "y"]
    assert names_of([runs[0], runs[0]]) == ["x", "x"]


def test_differing_keys_have_what_was_computed(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, computes in zip(folders, ("fp32", "fp32 fp32_matmul=medium"), strict=True):
        _write(folder, config="a: 1", **{"device.json": _device(computes)})
    runs = [read_run(folder) for folder in folders]
    assert differing_keys(runs) == {"computes": ["fp32", "fp32 fp32_matmul=medium"]}
    assert [run.device for run in runs] == ["fp32", "fp32"]


def test_differing_keys(tmp_path: Path) -> None:
    one = read_run(_write(tmp_path / "1", config="a: {b: 1, c: 2}\nx: {run_dir: p}\n"))
    two = read_run(_write(tmp_path / "2", config="a: {b: 1, c: 3}\nx: {run_dir: q}\nd: null\ne: []\n"))
    assert differing_keys([one, two]) == {"a.c": [2, 3], "e": [None, []]}


def test_differing_keys_are_those_that_the_user_varied(tmp_path: Path) -> None:
    runs = []
    for name, overrides in (
        ("1", ["augment=none", "seed=1"]),
        ("2", ["+augment=digits", "a.b=5", "run_dir=x"]),
    ):
        run = read_run(
            _write(tmp_path / name, config=f"a: {{b: {4 * int(name) - 3}}}\nseed: 1\necho: {name}\n")
        )
        runs.append(replace(run, about=replace(run.about, overrides=overrides)))
    assert differing_keys(runs) == {"augment": ["none", "digits"], "a.b": [1, 5]}


# --- the parts ----------------------------------------------------------------------------------

WORDS = st.lists(st.sampled_from(["a", "b", "c", "dd"]), max_size=9).map(" ".join)


@given(WORDS, WORDS)
def test_alignment_has_the_fewest_errors_and_both_texts(reference: str, hypothesis: str) -> None:
    pairs = align(reference, hypothesis)
    errors = sum(tag != "equal" for tag, _, _ in pairs)
    assert errors == Levenshtein.distance(reference.split(), hypothesis.split())
    assert " ".join(left for _, left, _ in pairs if left) == reference
    assert " ".join(right for _, _, right in pairs if right) == hypothesis
    for tag, left, right in pairs:
        kind = "delete" if not right else "insert" if not left else "equal" if left == right else "replace"
        assert tag == kind


def _chart(*values: float | None, maybe_log: bool = True, from_zero: bool = False) -> Chart:
    curve = Curve([float(i) for i in range(len(values))], list(values))
    lines = [Line("a", curve, is_faint=True), Line("a", curve)]
    return Chart("WER", lines, "%", from_zero, maybe_log, last_step=len(values))


@pytest.mark.slow
@settings(max_examples=20)
@example([4.0, 2.2250738585072014e-308], False, True)
@example([1.7e308, -1.7e308], False, True)
@example([1e12, 1e12 + 1e-4], True, False)
@given(
    st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), min_size=1),
    st.booleans(),
    st.booleans(),
)
def test_any_curve_can_be_drawn(values: list[float | None], from_zero: bool, maybe_log: bool) -> None:
    chart = _chart(*values, from_zero=from_zero, maybe_log=maybe_log)
    assert bool(chart.visible) == any(v is not None for v in values)
    if chart.visible:
        assert "nan" not in chart.svg
        assert "inf" not in chart.svg
        Page(chart.svg)


def test_a_long_noisy_curve_stays_small_and_keeps_its_peaks() -> None:
    values = [1.0 + i % 7 for i in range(20_000)]
    values[5_003] = 40.0
    heights = [float(y) for y in re.findall(r"[ML] [-\d.]+ ([-\d.]+)", _chart(*values).svg)]
    assert len(_chart(*values).svg) < 150_000
    assert min(heights) < 30  # of 260, from the top


# --- what people and disks do -------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
EVENT = st.dictionaries(
    st.sampled_from(
        ["step", "set", "loss", "wer", "lr", "rows", "time", "message", "steps", "parameters", "eta_s", "id"]
    ),
    JSON,
    max_size=6,
)
NAMES = st.sampled_from(
    ["start", "resume", "train", "valid", "examples", "checkpoint", "warning", "end", "other"]
)
FILE = st.dictionaries(
    st.sampled_from(
        [
            "status",
            "metrics",
            "steps",
            "wall_s",
            "error",
            "argv",
            "overrides",
            "git",
            "versions",
            "host",
            "seed",
        ]
    ),
    JSON,
    max_size=5,
)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(st.tuples(NAMES, EVENT), max_size=6), FILE, FILE, JSON, st.text(max_size=30))
@example([], {}, {"overrides": [None, 1, ["run_dir=x"]]}, None, "")
def test_no_content_breaks_the_page(
    events: list[tuple[str, dict[str, Any]]],
    result: dict[str, Any],
    about: dict[str, Any],
    skipped: Any,
    config: str,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps({"event": event, **values}) + "\n" for event, values in events)
        )
        (folder / "result.json").write_text(json.dumps(result))
        (folder / "run.json").write_text(json.dumps(about))
        (folder / "skipped.jsonl").write_text(json.dumps(skipped) + "\n")
        (folder / "config.yaml").write_text(config, encoding="utf-8", errors="replace")
        run = read_run(folder)
        Page(page([run]))
        Page(page([run, run]))


@pytest.mark.slow
def test_the_command_writes_and_names_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _whole_run(tmp_path / "run")
    assert report([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    Page((folder / "report.html").read_text())
    assert report([str(folder), str(folder), "--out", str(tmp_path / "both.html")]) == 0
    assert "2 runs compared" in (tmp_path / "both.html").read_text()
    with pytest.raises(ConfigError, match=r"t.csv: the report is an HTML page. Name it t.html"):
        report([str(folder), "--out", str(tmp_path / "t.csv")])
    assert not (tmp_path / "t.csv").exists()
    assert report([str(folder), str(folder)]) == 0
    assert (folder / "comparison.html").exists()


def test_links_that_lead_out_of_a_folder_of_runs_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private = _write(tmp_path / "home", config="token: PRIVATE\n")
    runs = tmp_path / "runs"
    _write(runs / "a", result={"status": "finished"}, config="seed: 1\n")
    (runs / "b").symlink_to("a")
    (runs / "x").symlink_to("../home")
    assert runs_in(str(runs)) == [runs / "a", runs / "b"]
    (runs / "a" / "config.yaml").unlink()
    with pytest.raises(RunError, match="no run in it"):
        report([str(runs)])
    assert list(private.iterdir()) == [private / "config.yaml"]


def test_a_page_says_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"id": "a", "reference": "one two", "hypothesis": "one"}
    long_row = {"id": "b", "reference": "one " * 10_001, "hypothesis": ""}
    events = [("valid", {"step": 1, "set": f"s{number}", "wer": 0.1}) for number in range(40)]
    events.append(("examples", {"step": 1, "set": "s0", "rows": [row, long_row, *[row] * 38]}))
    folder = _write(tmp_path / "run", *events, config="a: ${b}\nb: 1\n")
    monkeypatch.setattr(run_directory, "_MAX_ROWS", 41)
    (folder / "skipped.jsonl").write_text('{"id": "a"}\n' * 50)
    run = read_run(folder)
    assert run.notes[:2] == ("9 lines of logs are left out", "10 sets are left out")
    assert "config.yaml is damaged ('${b}' refers to more than ${oc.env:NAME,default})" in run.notes[2]
    assert len(run.valid["wer"]) == 30
    text = Page(page([run])).words
    assert "29 of 40 shown" in text
    assert all(note in text for note in run.notes)


def test_a_folder_of_runs_is_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        about = {"argv": [], "overrides": ["recipe=demo", f"run_dir={name}", f"optimizer.lr={ord(name)}"]}
        (_whole_run(tmp_path / "sweep" / name) / "run.json").write_text(json.dumps(about))
    (tmp_path / "sweep" / "multirun.yaml").write_text("")
    assert report([str(tmp_path / "sweep")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'sweep' / 'comparison.html'}\n"
    page = Page((tmp_path / "sweep" / "comparison.html").read_text())
    assert "optimizer.lr=97 finished" in page.words  # not the folder's name, a hash
    assert "optimizer.lr=98, test" in page.words


def test_the_score_is_that_of_the_checkpoint_that_is_used(tmp_path: Path) -> None:
    rates = {10: (0.2, 3.0), 20: (0.1, 2.0), 30: (0.1, 1.0), 40: (0.4, 0.5)}
    events = []
    for step, (wer, loss) in rates.items():
        events.append(("valid", {"step": step, "set": "dev", "wer": wer, "loss": loss}))
        events.append(("valid", {"step": step, "set": "test", "wer": 1 - wer, "loss": 1.0}))
    note = tmp_path / "run" / "checkpoints" / "best.json"
    note.parent.mkdir(parents=True)
    note.write_text('{"name": "step-00000030", "metric": 0.1}')
    words = _page(_write(tmp_path / "run", *events)).words
    assert "WER dev 10.00 % best, at step 30; last 40.00 %" in words
    assert "WER test 90.00 % best, at step 30; last 60.00 %" in words
    (tmp_path / "run" / "result.json").write_text('{"status": "finished", "checkpoint": "step-00000010"}')
    assert "WER dev 20.00 % best, at step 10; last 40.00 %" in _page(tmp_path / "run").words


def test_a_page_that_cannot_be_written_names_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _whole_run(tmp_path / "run")
    for target in (tmp_path, tmp_path / "no" / "x.html"):
        assert exit_code_of(lambda target=target: report([str(folder), "--out", str(target)])) == 5
        assert f"error: {target}: " in capsys.readouterr().err
    assert exit_code_of(lambda: report([str(tmp_path / "none")])) == 5
    assert f"error: {tmp_path / 'none'}: no such directory" in capsys.readouterr().err


@pytest.mark.slow
def test_neither_help_nor_a_page_needs_torch(tmp_path: Path) -> None:
    folder = _whole_run(tmp_path / "run")
    code = (
        "import sys\nfrom speechtrain.commands.report import run\nassert 'matplotlib' not in sys.modules\n"
        f"run([{str(folder)!r}])\nsys.exit(bool({{'torch', 'hydra', 'rich'}} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)
