"""No link of the documentation is broken, the index reaches each page, and no class or code is left out."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from speechtrain import errors

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md", ".github/**/*.md")
LINK = re.compile(r"\]\(([^()\s]+)\)|<img[^>]* src=\"([^\"]+)\"")


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


def test_the_table_of_exit_codes_has_each_error() -> None:
    page = (DOCS / "runs.md").read_text()
    for error in errors.SpeechtrainError.__subclasses__():
        if error.__module__ == errors.__name__:
            assert f"\n| {error.exit_code} | `{error.__name__}` |" in page
    assert f"\n| {errors.EXIT_KILLED} |" in page


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


def test_each_name_of_the_api_page_exists() -> None:
    names = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    missing = []
    for path in names:
        module, _, name = path.rpartition(".")
        if not hasattr(importlib.import_module(module), name):
            missing.append(path)
    assert names
    assert missing == []
