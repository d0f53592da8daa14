"""The reference is up to date and complete, the index reaches each page, and no link is broken."""

from __future__ import annotations

import importlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from omegaconf import DictConfig

from speechtrain.runs.compose import compose

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md", ".github/**/*.md")
LINK = re.compile(r"\]\(([^()\s]+)\)|<img[^>]* src=\"([^\"]+)\"")


@pytest.fixture(scope="module")
def reference() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import reference

        yield reference
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def config_page() -> str:
    return (DOCS / "reference" / "config.md").read_text(encoding="utf-8")


def pages() -> list[Path]:
    paths: list[Path] = []
    for pattern in PAGES:
        paths += sorted(ROOT.glob(pattern))
    return paths


def prose(path: Path) -> str:
    """Return a page without its code."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", lambda span: re.sub(r"[\[\]()<>]", "", span.group()), text)


def anchors(path: Path) -> set[str]:
    """Return the names that a code host gives to the headings of a page."""
    names: Counter[str] = Counter()
    result = set()
    for heading in re.findall(r"^#+ +(.*)$", prose(path), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        names[name] += 1
        if names[name] > 1:
            name = f"{name}-{names[name] - 1}"
        result.add(name)
    return result


def links(path: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield each relative link of a page, with the file and the anchor that it names."""
    for match in LINK.finditer(prose(path)):
        link = match[1] or match[2]
        if not re.match(r"[a-z]+:", link):
            name, _, anchor = link.partition("#")
            file = path.parent / name
            if not name:
                file = path
            yield link, file.resolve(), anchor


def broken_links(paths: list[Path]) -> list[str]:
    broken = []
    for path in paths:
        for link, file, anchor in links(path):
            is_missing = not file.exists() or (
                anchor and file.suffix == ".md" and anchor not in anchors(file)
            )
            if is_missing:
                broken.append(f"{path.name}: {link}")
    return broken


def test_each_class_that_a_choice_names_is_a_stored_name() -> None:
    """A run's config names the classes of its choices, so a class of conf/ keeps its name."""
    stored_names = (DOCS / "stored-names.md").read_text()
    for path in sorted((ROOT / "conf").rglob("*.yaml")):
        for name in re.findall(r"_target_: (speechtrain[\w.]+)", path.read_text()):
            assert f"`{name}`" in stored_names, f"{path}: docs/stored-names.md does not list {name}"


def test_no_link_is_broken() -> None:
    assert broken_links(pages()) == []


def test_a_broken_link_is_reported(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b.c` (d)\n\n# Twice\n\n# Twice\n\n[1](#a-bc-d) [2](#twice-1) [3](page.md#twice) `[4](none)`\n"
        "[5](other.md) [6](#twice-2) [7](https://host/none)\n"
    )
    assert broken_links([page]) == ["page.md: other.md", "page.md: #twice-2"]


def test_the_index_links_each_page() -> None:
    linked = {file for _, file, _ in links(DOCS / "index.md")}
    missing = {path.resolve() for path in DOCS.glob("**/*.md")} - linked - {DOCS / "index.md"}
    assert {str(path.relative_to(DOCS)) for path in missing} == set()


def test_the_generated_pages_are_up_to_date(reference: ModuleType) -> None:
    importlib.import_module("speechtrain.devices.recorder")  # The page leaves its error class out.
    assert reference.stale_pages() == [], "run make docs-reference"


def with_defaults(path: str = sys.executable, *names: str, size: int = 2**4, is_open: bool) -> Path:
    return Path(path)


def test_a_signature_has_the_source_of_a_default_and_not_its_value(reference: ModuleType) -> None:
    expected = "f(path: str = sys.executable, *names: str, size: int = 2 ** 4, is_open: bool) -> Path"
    assert reference.signature("f", with_defaults) == expected


def test_a_page_that_differs_is_reported(
    reference: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "PAGES", tmp_path)
    builders = {"config.md": lambda: "a", "python.md": lambda: "b", "exit-codes.md": lambda: "c"}
    monkeypatch.setattr(reference, "BUILDERS", builders)
    (tmp_path / "config.md").write_text("a")
    (tmp_path / "python.md").write_text("a")
    assert reference.stale_pages() == ["python.md", "exit-codes.md"]


def test_each_key_and_choice_has_a_meaning(reference: ModuleType, config_page: str) -> None:
    assert reference.config_reference.keys_without_meaning(config_page) == []
    for path, record in reference.RECORDS:
        comments = reference.config_reference.field_comments(record)
        assert [name for name, comment in comments.items() if not comment] == [], path


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
