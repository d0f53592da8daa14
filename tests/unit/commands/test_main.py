"""speechtrain: one program for all commands, with one style of help and of naming a run."""

from __future__ import annotations

import ast
import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from speechtrain.commands.evaluate import parser
from speechtrain.commands.main import COMMANDS, run
from speechtrain.errors import ConfigError
from speechtrain.start.command_line import read_command

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = Path(sys.executable).parent
HEAVY = ("torch", "hydra", "omegaconf", "lhotse")


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), ["evaluate", "--version"]],
)
def test_help_imports_no_heavy_library(arguments: list[str]) -> None:
    program = (
        "import sys; from speechtrain.commands.main import run\n"
        "try:\n    run(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"print(sorted(set(sys.modules) & {set(HEAVY)}), file=sys.stderr)"
    )
    line = [sys.executable, "-c", program, *arguments]
    process = subprocess.run(line, capture_output=True, text=True, check=True)
    assert process.stderr == "[]\n"
    assert process.stdout


def installed_commands() -> tuple[str, ...]:
    """Return the value of COMMANDS in setup.py, which cannot be imported."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMMANDS":
            return tuple(ast.literal_eval(node.value))
    raise AssertionError("setup.py assigns no COMMANDS")


def test_the_help_names_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    listed = re.findall(r"^  (\w+) +\w", capsys.readouterr().out, re.M)
    names = installed_commands()
    assert tuple(COMMANDS) == names
    assert listed[: len(names)] == list(names)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_the_same_sections(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        run([name, "--help"])
    text = capsys.readouterr().out
    sections = [
        "usage: speechtrain " + name,
        "positional arguments:",
        "options:",
        "examples:",
        "exit codes: ",
    ]
    places = [text.find(section) for section in sections]
    assert -1 not in places
    assert places == sorted(places)
    assert f"\n  speechtrain {name}" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], r"unknown command trian; did you mean 'train'\?; speechtrain --help shows"),
        (["recipe=demo"], "unknown command recipe=demo; speechtrain --help shows"),
        (["--hepl"], r"unknown option --hepl; did you mean '--help'\?; speechtrain --help shows"),
    ],
)
def test_another_name_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(arguments)


def test_no_name_prints_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == ConfigError.exit_code
    assert "\ncommands:\n  train " in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_has_the_same_line_everywhere(name: str) -> None:
    required_arguments = {
        "train": [],
        "doctor": [],
        "prepare": ["stats", "DIR"],
        "transcribe": ["RUN", "a.wav"],
        "export": ["RUN", "--out", "DIR"],
        "study": ["ask", "STUDY"],
    }
    arguments = required_arguments.get(name, ["RUN"])
    message = rf"^unknown option --hepl; did you mean '--help'\?; speechtrain {name} --help shows the usage$"
    with pytest.raises(ConfigError, match=message):
        run([name, *arguments, "--hepl"])


@pytest.mark.slow
def test_shell_completion_is_installed_for_a_program_that_exists() -> None:
    line = [SCRIPTS / "speechtrain", "train", "-sc", "install=bash"]
    text = subprocess.check_output(line, text=True)
    assert text.rstrip().endswith("-F hydra_bash_completion speechtrain-train speechtrain")


@pytest.mark.parametrize("argv", [["-sc", "query=bash"], ["train", "-sc", "query=bash"]])
@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("speechtrain train device=cpu model=rnnt_a", "model=rnnt_aidk"),
        ("speechtrain train final_decoder=", "final_decoder=ctc_beam"),
        (
            "speechtrain train recipe=nemo_quartznet data.train=a.json,b.json trainer.max_s",
            "trainer.max_steps=",
        ),
        ("speechtrain train final_", "final_decoder="),
        ("speechtrain train --config-dir CONFIG optimizer=m", "optimizer=mine"),
    ],
)
def test_the_arguments_of_train_are_completed(
    argv: list[str],
    line: str,
    completions: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("_target_: torch.optim.SGD\n")
    monkeypatch.setenv("COMP_LINE", line.replace("CONFIG", str(tmp_path)))
    monkeypatch.setattr(sys, "argv", ["speechtrain", *argv])
    assert run(argv) == 0
    assert completions in capsys.readouterr().out.split()


@pytest.mark.slow
def test_the_program_and_its_other_name_print_the_same() -> None:
    texts = []
    for line in (["speechtrain", "report"], ["speechtrain-report"]):
        process = subprocess.run([SCRIPTS / line[0], *line[1:], "nix"], capture_output=True, text=True)
        assert process.returncode == 5
        texts.append(process.stderr)
    assert texts[0] == texts[1]
    assert "nix: no such directory" in texts[0]


def test_a_run_has_two_forms_in_every_command(tmp_path: Path) -> None:
    run_parser = parser()
    options = ["--worst", "1", "decoder=beam"]
    for words in (["runs/a b", *options], [*options, "run_dir=runs/a b"], ["run_dir='runs/a b'", *options]):
        arguments = run_parser.parse_with_run(words)
        assert (arguments.run, arguments.overrides) == (Path("runs/a b"), ["decoder=beam"])
    run_dir = tmp_path / "it's a run"
    run_dir.mkdir()
    (run_dir / "run.json").write_text("{}")
    command = read_command([str(run_dir), "trainer.max_steps=3"])
    assert command.run_dir == run_dir
    assert command.overrides[1:] == ["trainer.max_steps=3"]
    too_long_for_a_file = "a" * 300  # The system raises an error for such a name, and not "no such file".
    assert read_command([too_long_for_a_file]).overrides == [too_long_for_a_file]
    with pytest.raises(ConfigError, match=r"neither KEY=VALUE nor a run directory"):
        read_command([str(tmp_path)])
