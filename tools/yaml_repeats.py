"""Count the YAML lines that repeat a sibling's: ``yaml_repeats.py [FOLDER]``, ``conf/`` by default.

Prints, for each group and in all, how many keys with a value there are, and how many of them another file
of the same group has, too, with the same value at the same path. A file counts as it stands, without what
it inherits through Hydra's ``defaults``. A base YAML, whose name begins with ``_``, is a file of its group.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Each key path of a file with its value as text; a list and an empty mapping are values."""
    if not isinstance(node, dict) or not node:
        yield path, repr(node)
        return
    for key, value in node.items():
        yield from leaves(value, f"{path}.{key}".lstrip("."))


def own_lines(file: Path) -> list[tuple[str, str]]:
    """A file's keys and values, with the group as the first key, which ``@package _global_`` writes out."""
    text = file.read_text()
    node = yaml.safe_load(text) or {}
    node.pop("defaults", None)  # Hydra's list of what is inherited
    if not node:
        return []
    return list(leaves(node if "# @package _global_" in text else {file.parent.name: node}))


def repeats(group: Path) -> tuple[int, int]:
    """Lines of a group's files that another file of it has, too, and all of its lines."""
    lines = [line for file in sorted(group.glob("*.yaml")) for line in own_lines(file)]
    return sum(number for number in Counter(lines).values() if number > 1), len(lines)


def main(argv: list[str]) -> int:
    folder = Path(argv[0]) if argv else Path(__file__).resolve().parents[1] / "conf"
    counts = {group.name: repeats(group) for group in sorted(folder.iterdir()) if any(group.glob("*.yaml"))}
    counts["total"] = (sum(r for r, _ in counts.values()), sum(n for _, n in counts.values()))
    print(f"{'group':<12}{'repeated':>10}{'all':>8}")
    for name, (repeated, every) in counts.items():
        print(f"{name:<12}{repeated:>10}{every:>8}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
