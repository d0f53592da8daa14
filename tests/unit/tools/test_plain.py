"""The gate of plain code: its counts, its ceilings and its messages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "tools/plain.py"


@pytest.fixture(scope="module")
def gate() -> ModuleType:
    specification = importlib.util.spec_from_file_location("plain", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["plain"] = module  # A dataclass looks its own module up.
    specification.loader.exec_module(module)
    return module


VAGUE = "def found(at):\n    self.kept, _told = 1, 2\n"
MANNERED = """
def read():
    '''Read what the file has; where there is no line, so much is lost.'''
    # It is those of the run.
    raise ValueError("the file tells; read it")
"""
TWO_LOOPS = "pairs = [(a, b) for a in x for b in y]\n"
INNER_LOOP = "pairs = [[b for b in a] for a in x]\n"
LONG = f"names = [f({', '.join('abcdefghijklmnop')}) for a in x]\n"
CONDITIONAL = "call(a if b else c)\n"
NESTED = "a(b(c(d(e))))\n"


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        (VAGUE, {"vague name": 4}),
        (MANNERED, {"mannered phrase": 6, "semicolon": 2}),
        (TWO_LOOPS, {"comprehension with two loops": 1}),
        (INNER_LOOP, {"comprehension with two loops": 1}),
        ('parser.add_argument("x", help="so many; told")\n', {"mannered phrase": 2, "semicolon": 1}),
        ('HELP = """what it is"""\n', {"mannered phrase": 1}),
        (LONG, {"comprehension of more than 30 tokens": 1}),
        (CONDITIONAL, {"conditional inside an expression": 1}),
        (NESTED, {}),
        (f"f({NESTED.strip()})", {"statement nested 5 deep": 1}),
        ("value = a if b else c\n", {}),
        ("lines = [row.text for row in rows]\n", {}),
        ("def read():\n" + "    call()\n" * 100, {"tokens of functions beyond 220": 80}),
        ("def read(" + ", ".join(f"a{n}: int" for n in range(80)) + "):\n    call()\n", {}),
    ],
)
def test_measure_source_counts(gate: ModuleType, source: str, counts: dict[str, int]) -> None:
    assert gate.measure_source(source).counts() == counts


def test_measure_yaml_counts_comments_only(gate: ModuleType) -> None:
    text = "# so many; told\nkey: told; found  # what it is\nlist: '#;'\n"
    assert gate.measure_yaml(text).counts() == {"mannered phrase": 3, "semicolon": 1}


def test_measure_source_skips_strings_that_are_no_prose(gate: ModuleType) -> None:
    assert gate.measure_source('print("told; found", f"{x; y}"[0])'.replace("{x; y}", "{x}")).counts() == {}


def test_measure_page_skips_code(gate: ModuleType) -> None:
    page = "A line; another.\n\n```\na; b; c\n```\n\n    d; e\n\n| a `x; y` | b; c |\n"
    figures = gate.measure_page(page)
    assert figures.counts() == {"semicolon": 2}
    assert [finding.line for finding in figures.findings] == [1, 9]


def messages(
    gate: ModuleType, sources: dict[str, str], ceilings: dict[str, dict[str, int]], **origins: str
) -> list[str]:
    measures = {}
    for name, source in sources.items():
        measures[name] = gate.measure_source(source)
    return gate.violations(gate.Ceilings(ceilings, origins), measures)


def test_violations_of_a_new_file(gate: ModuleType) -> None:
    text = VAGUE + TWO_LOOPS
    lines = messages(gate, {"new": text}, {})
    assert len(lines) == 4
    assert lines[0].startswith("new:1: vague name 'found' (4, the limit of a new file is 0)")
    assert messages(gate, {"new": TWO_LOOPS + CONDITIONAL + LONG}, {}) == []
    assert len(messages(gate, {"new": TWO_LOOPS + INNER_LOOP}, {})) == 2
    assert messages(gate, {"new": "# One; two.\n"}, {}) == []
    assert len(messages(gate, {"new": "# One; two; three.\n"}, {})) == 1


def test_violations_of_a_listed_file(gate: ModuleType) -> None:
    assert messages(gate, {"old": VAGUE}, {"old": {"vague name": 4}}) == []
    assert len(messages(gate, {"old": VAGUE}, {"old": {"vague name": 3}})) == 4
    assert messages(gate, {"old": TWO_LOOPS}, {"old": {}}) == [
        "old:1: comprehension with two loops 'for' (1, the ceiling of old is 0)"
    ]


def test_violations_of_a_split_file(gate: ModuleType) -> None:
    ceilings = {"old": {"vague name": 4, "comprehension with two loops": 1}}
    assert messages(gate, {"a": VAGUE, "b": TWO_LOOPS}, ceilings, a="old", b="old") == []
    lines = messages(gate, {"a": VAGUE, "b": VAGUE}, ceilings, a="old", b="old")
    assert len(lines) == 8
    assert lines[4].startswith("b:1: vague name")


def test_lower_ceilings(gate: ModuleType, tmp_path: Path) -> None:
    ceilings = gate.Ceilings(
        {"a": {"vague name": 9, "semicolon": 2}, "gone": {}}, {"b": "a", "gone-too": "a"}
    )
    gate.lower(ceilings, {"b": gate.measure_source(VAGUE)})
    assert ceilings == gate.Ceilings({"a": {"vague name": 4}}, {"b": "a"})
    ceilings.save(tmp_path / "ceilings.json")
    assert gate.Ceilings.load(tmp_path / "ceilings.json") == ceilings


@pytest.mark.slow
def test_check_passes_here(gate: ModuleType) -> None:
    """The repository itself keeps its ceilings, also without ``make check``."""
    assert gate.violations(gate.Ceilings.load(gate.CEILINGS), gate.gated_measures()) == []
