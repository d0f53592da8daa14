"""The pages of ``make docs-reference`` have each command, each key with a meaning, and each class."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from omegaconf import DictConfig

from speechtrain.runs.compose import compose

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def reference() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import reference

        yield reference
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def pages(reference: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the written pages."""
    folder = tmp_path_factory.mktemp("reference")
    reference.main([str(folder)])
    return folder


@pytest.fixture(scope="module")
def config_page(pages: Path) -> str:
    return (pages / "config.md").read_text(encoding="utf-8")


def headings(page: Path) -> list[str]:
    return re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_pages_have_each_command_and_class(reference: ModuleType, pages: Path) -> None:
    commands = headings(pages / "commands.md")
    assert [name for name in reference.COMMANDS if f"speechtrain {name}" not in commands] == []
    classes = headings(pages / "python.md")
    for path in (*reference.USE, *reference.PARTS):
        assert path.rpartition(".")[2] in classes


def test_the_links_of_the_pages_name_files(pages: Path) -> None:
    links = set()
    for page in pages.iterdir():
        links |= set(re.findall(r"\]\(\.\./\.\./([^)#]+)", page.read_text(encoding="utf-8")))
    assert len(links) > 50
    assert [link for link in links if not (ROOT / link).exists()] == []


def with_defaults(path: str = sys.executable, *names: str, size: int = 2**4, is_open: bool) -> Path:
    return Path(path)


def test_a_signature_has_the_source_of_a_default_and_not_its_value(reference: ModuleType) -> None:
    expected = "f(path: str = sys.executable, *names: str, size: int = 2 ** 4, is_open: bool) -> Path"
    assert reference.signature("f", with_defaults) == expected


def test_each_key_and_choice_has_a_meaning(reference: ModuleType, config_page: str) -> None:
    assert reference.config_reference.keys_without_meaning(config_page) == []


def test_a_key_without_a_meaning_is_reported(reference: ModuleType) -> None:
    rows = [
        "| `a` | int | `1` |  |",
        "| `b` | int | `1` | B. |",
        "| [`c`](c.yaml) |  | `C` | `a=2` |",
        "| [`d`](d) | D. |",
    ]
    assert reference.config_reference.keys_without_meaning("\n".join(rows)) == ["`a`", "[`c`](c.yaml)"]


def leaves(node: object, path: str = "") -> Iterator[str]:
    if isinstance(node, DictConfig) and node:
        for key in node:
            yield from leaves(node._get_node(key), f"{path}.{key}".lstrip("."))
    else:
        yield path


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model=wav2vec2", "device=cuda", "launcher=slurm", "precision=fp16", "optimizer=lamb"],
        ["encoder=quartznet_tiny", "launcher=kubernetes", "decoder=beam", "schedule=mlperf", "device=hpu"],
        ["encoder=fastconformer_tiny", "prediction=stateless", "launcher=ssh", "data=fsdd", "optimizer=sgd"],
    ],
)
def test_each_key_of_a_composed_config_is_listed(overrides: list[str], config_page: str) -> None:
    listed = set(re.findall(r"`\+?([\w.-]+)`", config_page)) | {"final_decoder"}
    missing = []
    for path in leaves(compose(overrides)):
        parent, _, key = path.rpartition(".")
        if key != "_target_" and not {path, parent.replace("final_decoder", "decoder"), parent} & listed:
            missing.append(path)
    assert missing == []


@pytest.mark.parametrize(
    "row",
    [
        "| `trainer.max_steps` | int or null | `${oc.env:NUM_STEPS,null}` | ",
        "| `decoder.width` | int | `4` | Label sequences kept for each utterance. |",
        "| `+optimizer.maximize` | bool | `false` | ",
        "| `data.batch.count`<br>`data.valid_batch.count` | int or null | `16` | ",
        "| `launcher.one.inline`<br>`launcher.inline` | bool | `false` | ",
    ],
)
def test_a_row_has_type_default_and_meaning(row: str, config_page: str) -> None:
    assert row in config_page


def test_a_choice_lists_the_values_that_it_sets(config_page: str) -> None:
    (line,) = [line for line in config_page.split("\n") if line.startswith("| [`rnnt`](")]
    assert "`encoder=lstm_small`" in line
    assert "`model.joint.hidden=256`" in line
    assert "sigma" not in line
