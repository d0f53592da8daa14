"""Each command in the documentation can be typed: its own program parses it, or it starts as a dry run.

A training command gets small fixtures in place of the data, tokenizers and runs that it names.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from omegaconf import DictConfig

from speechtrain.commands import prepare, train
from speechtrain.errors import SpeechtrainError
from speechtrain.interop.pretrained import describe
from speechtrain.interop.weights import write_imported
from speechtrain.start.command_line import Command, check_flags, read_command
from speechtrain.start.compose import compose_with_choices
from speechtrain.start.from_data import explicit_keys, follow_data
from speechtrain.start.job import _refuse_other_validation
from speechtrain.start.recipe_needs import settle_needs
from speechtrain.start.resolved import with_absolute_paths
from speechtrain.start.resume import config_to_continue, run_to_continue
from speechtrain.start.start import start_run
from speechtrain.start.targets import ALLOW_TARGETS
from tests.support.tiny_run import TINY, untrained

from .support.digits import write_digits
from .support.documented_commands import (
    COMMAND,
    Example,
    check_device,
    commands_of,
    composed,
    first_job,
    parse,
    with_fixtures,
)
from .unit.interop.conftest import make

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md", "examples/**/*.md", "conf/**/*.yaml")

_FENCE = re.compile(r"\s*(```|~~~)")
_INCOMPLETE = re.compile(r"arguments are required|expected one argument|needs '\w+'\. Set")


def examples_of(page: str, text: str) -> Iterator[Example]:
    """Yield the commands of a page: in code blocks and between backticks."""
    if page.endswith(".yaml"):
        text = comments_of(text)
    sentences = []
    block: list[str] = []  # the lines of one command
    is_fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        is_fence = _FENCE.match(line) is not None
        is_fenced ^= is_fence
        is_code = not is_fence and (is_fenced or bool(block) or line.startswith("    "))
        sentences.append("" if is_code or is_fence else line)
        if not is_code:
            continue
        block.append(line.strip().removesuffix("\\"))
        if not line.endswith("\\") and is_whole(" ".join(block)):
            yield from commands_of(f"{page}:{number - len(block) + 1}", " ".join(block), is_sentence=False)
            block = []
    prose = "\n".join(sentences)
    for span in re.finditer(r"`([^`]+)`", prose):
        number = prose.count("\n", 0, span.start()) + 1
        yield from commands_of(f"{page}:{number}", " ".join(span[1].split()), is_sentence=True)


def comments_of(text: str) -> str:
    """Return the comments of a YAML file, line by line. A comment of three spaces or more is a code block."""
    lines = []
    for line in text.split("\n"):
        indent = "    " if line.startswith("#   ") else ""
        lines.append(indent + line.partition("#")[2].strip())
    return "\n".join(lines)


def is_whole(line: str) -> bool:
    """Return True if the command of a line closes each of its quotes, or if the line has no command."""
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return COMMAND.search(line) is None
    return True


def documented() -> list[Example]:
    """Return the commands of all pages that have arguments. A repeated command is one, with all places.

    The line of the shell's completion (``-sc``) starts no run. tests/unit/commands/test_main.py has its test.
    """
    places: dict[Example, str] = {}
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            if path.name == "tutorial.md":  # test_tutorial.py runs its commands.
                continue
            for example in examples_of(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")):
                if example.words and "-sc" not in example.words:
                    key = replace(example, source="")
                    before = f"{places[key]}, " if key in places else ""
                    places[key] = before + example.source
    return [replace(key, source=source) for key, source in places.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a small file or folder for each name that the pages use."""
    folder = tmp_path_factory.mktemp("pages")
    write_digits(folder / "speech", train=12, valid=4)
    model = str(folder / "tokenizer.model")
    assert prepare.run(["tokenizer", "--corpus", "digits", "--out", model, "--size", "24"]) == 0
    untrained(folder / "RUN", *TINY)
    (folder / "RUN" / "run.json").write_text('{"overrides": [], "written": {}}')
    task = make()
    write_imported(describe(task, task.state_dict()), folder / "DIR")
    write_recordings(folder / "corpus")
    for corpus in ("librispeech", "common_voice", "tedlium3", "switchboard"):
        manifests = folder / "corpus" / "manifests" / corpus
        manifests.mkdir(parents=True)
        for name in ("tokenizer.model", "bpe1024.model"):
            (manifests / name).symlink_to(model)
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "hosts").write_text("a\nb\n")
    (folder / "my_conf" / "model").mkdir(parents=True)
    (folder / "my_conf" / "model" / "mine.yaml").write_text("_target_: my_models.Mine\n")
    source = "from speechtrain.models.ctc import CTC\n\n\nclass Mine(CTC):\n    pass\n"
    (folder / "my_models.py").write_text(source)
    write_tracker(folder)
    return folder


def write_tracker(folder: Path) -> None:
    """Write the two files that docs/trackers.md shows."""
    _, code, _, choice, _ = re.split(r"```(?:python|yaml)?\n", (ROOT / "docs/trackers.md").read_text())[:5]
    (folder / "csv_tracker.py").write_text(code)
    (folder / "conf" / "tracking").mkdir(parents=True)
    (folder / "conf" / "tracking" / "csv.yaml").write_text(choice)


def write_recordings(folder: Path) -> None:
    """Write silence under the names of the Free Spoken Digit Dataset and of the plug-in's corpus."""
    silence = np.zeros(1600, np.int16)
    for part in ("recordings", "train", "dev"):
        (folder / part).mkdir(parents=True)
    for digit in range(10):
        for index in range(8):
            soundfile.write(folder / "recordings" / f"{digit}_ann_{index}.wav", silence, 8000)
            soundfile.write(folder / "recordings" / f"{digit}_nicolas_{index}.wav", silence, 8000)
    for part in ("train", "dev"):
        soundfile.write(folder / part / "seven_theo_3.wav", silence, 8000)


def start(words: list[str], is_partial: bool) -> None:
    """Start a training command as a dry run: of a sweep its first job, without the launcher of Hydra.

    Raises the SpeechtrainError of the command.
    """
    of_hydra = [word for word in words if word.startswith("hydra")]
    if of_hydra:
        composed(of_hydra)
    words = [word for word in words if word not in of_hydra]
    groups = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    if is_partial and "data.train" in groups and not groups.keys() & {"data", "recipe"}:
        words.append("data=manifest")  # The ellipsis stands for it.
        groups["data"] = "manifest"
    if "--help" in words:
        assert train.run(words) == 0
        return
    command = read_command([*words, "dry_run=true"])
    check_flags(command.flags)
    run_dir = run_to_continue(command)
    if run_dir is not None:
        config = config_to_continue(run_dir, command)
    else:
        command = replace(command, overrides=first_job(command.overrides))
        config = new_config(command)
        if "recipe" not in groups:
            _refuse_other_validation(command, config, groups.get("data", "digits"))
    start_run(command, config, {})


def new_config(command: Command) -> DictConfig:
    """Compose the config of a new run, with the keys that its data decides."""
    config, group_choices, _ = compose_with_choices(command.overrides, command.config_dir)
    check_device(group_choices, config)
    config.run_dir = str(command.run_dir or Path("new").resolve())
    with_absolute_paths(config)
    if not settle_needs(config):
        follow_data(config, explicit_keys(command.overrides, {}))
    return config


@pytest.mark.parametrize("example", documented(), ids=lambda example: example.source)
def test_a_documented_command_can_be_typed(
    example: Example, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv(ALLOW_TARGETS, "")  # The fixture then undoes the command's change.
    monkeypatch.delenv(ALLOW_TARGETS)
    for name, value in example.variables:
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DATASET_DIR", str(folder / "corpus"))
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "plugin"))
    monkeypatch.syspath_prepend(str(folder))
    words = with_fixtures(example.words, folder)
    line = f"{example.source}: speechtrain-{example.program} {shlex.join(example.words)}"
    try:
        if example.program == "train":
            start(words, example.is_partial)
        else:
            parse(example.program, words)
    except SystemExit as end:
        if end.code:
            pytest.fail(line, pytrace=False)
    except SpeechtrainError as error:
        is_omitted = example.is_partial and _INCOMPLETE.search(str(error)) is not None
        if not is_omitted:
            pytest.fail(f"{line}\n{error}", pytrace=False)
