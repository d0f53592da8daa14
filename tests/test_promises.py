"""docs/promises.csv has an answer to each promise of the reference systems and runtimes."""

from __future__ import annotations

import ast
import csv
import re
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from speechtrain.errors import SpeechtrainError
from speechtrain.start.check_keys import check
from speechtrain.start.command_line import read_command
from speechtrain.start.compose import compose_with_choices
from tests.support.documented_commands import (
    Example,
    check_device,
    commands_of,
    first_job,
    parse,
    with_fixtures,
)
from tests.support.tiny_run import TINY, untrained

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
COLUMNS = ["number", "system", "promise", "command", "test", "evidence"]
COMMAND = re.compile(r"([A-Z_]+=\S+ )*speechtrain |make ")
ANSWER = re.compile(r"answered: .{40}")
EVIDENCE = re.compile(r"make test(-all|-nightly)?|rehearsal only|hardware \d{4}-\d\d-\d\d")

Row = dict[str, str]


def rows() -> list[Row]:
    with (ROOT / "docs" / "promises.csv").open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        assert reader.fieldnames == COLUMNS
        return list(reader)


@lru_cache
def functions_of(path: Path) -> set[str]:
    """Return the names of the functions of a Python file, without an import."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def names_of_tests_in(target: str, paths: list[str]) -> set[str]:
    """Return the tests in these files that a target of the Makefile runs, at least in part."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    match = re.search(rf"^{target}: .*\n\t.* -m '(.*)'$", makefile, flags=re.MULTILINE)
    assert match is not None
    line = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", match[1], *paths]
    process = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout
    return {name.partition("[")[0] for name in process.stdout.splitlines() if "::" in name}


def example_of(row: Row) -> Example | None:
    """Return the command of a row: the whole cell, or in an answer the text between backticks."""
    text = row["command"]
    if ANSWER.match(text):
        text = "".join(re.findall(r"`([^`]+)`", text))
    examples = list(commands_of(f"promise {row['number']}", text, is_sentence=False))
    return examples[0] if examples else None


def test_each_promise_has_a_command_or_an_answer() -> None:
    numbers = []
    for row in rows():
        numbers.append(int(row["number"]))
        assert row["system"], row
        assert row["promise"], row
        kinds = [pattern for pattern in (COMMAND, ANSWER) if pattern.match(row["command"])]
        assert len(kinds) == 1, row
        if COMMAND in kinds:
            assert row["test"], row
        assert bool(EVIDENCE.fullmatch(row["evidence"])) == bool(row["test"]), row
    assert numbers == list(range(1, 122))


def test_each_test_of_a_promise_exists() -> None:
    for row in rows():
        if row["test"]:
            path, function = row["test"].split("::")
            assert function in functions_of(ROOT / path), row


def test_the_target_of_a_row_runs_its_test() -> None:
    targets_of_rows = {row["test"]: row["evidence"] for row in rows() if row["evidence"].startswith("make ")}
    paths = sorted({test.partition("::")[0] for test in targets_of_rows})
    targets = dict.fromkeys(targets_of_rows, "make test-nightly")
    for target in ("test-all", "test"):
        for test in names_of_tests_in(target, paths) & targets_of_rows.keys():
            targets[test] = f"make {target}"
    assert targets_of_rows == targets


def test_each_make_target_of_a_promise_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [row["command"].removeprefix("make ") for row in rows() if row["command"].startswith("make ")]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_each_command_of_a_promise_is_composed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_conf").mkdir()
    untrained(tmp_path / "RUN", *TINY)
    commands: dict[Example, str] = {}
    for row in rows():
        example = example_of(row)
        if example is not None:
            commands.setdefault(replace(example, source=""), example.source)
    faults = []
    for example, source in commands.items():
        with monkeypatch.context() as environment:
            for name, value in example.variables:
                environment.setenv(name, value)
            fault = fault_of(example, tmp_path)
        if fault:
            faults.append(f"{source}: {fault}")
    assert not faults, "\n".join(faults)
    assert len(commands) > 70


def fault_of(example: Example, folder: Path) -> str:
    """Return the error of a command, or an empty text."""
    words = with_fixtures(example.words, folder)
    try:
        if example.program == "train":
            command = read_command(words)
            overrides = first_job(command.overrides)
            config, group_choices, _ = compose_with_choices(overrides, command.config_dir)
            check_device(group_choices, config)
            config.run_dir = str(folder / "new")
            check(config)
        else:
            parse(example.program, words)
    except SystemExit as end:
        return str(end.code or "")
    except SpeechtrainError as error:
        return str(error)
    return ""
