"""Count the YAML lines that repeat a line of another file: ``yaml_repeats.py [FOLDER]``, else ``conf/``.

For each config group and in total, the program prints two numbers:

- repeated: keys that another file of the same group has at the same path with the same value
- all: keys with a value

Keys that a file inherits through Hydra's ``defaults`` do not count. Base files, whose names begin with ``_``,
count as files of their group.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each key with a value, and the value as text. Lists and empty mappings are values."""
    if not isinstance(node, dict) or not node:
        yield path, repr(node)
        return
    for key, value in node.items():
        yield from leaves(value, f"{path}.{key}".lstrip("."))


def own_lines(file: Path) -> list[tuple[str, str]]:
    """Return the key paths and values in a file, without inherited keys. Each path begins with the group.

    A file with ``@package _global_`` contains the group's name as a key.
    """
    text = file.read_text()
    node = yaml.safe_load(text) or {}
    node.pop("defaults", None)  # Hydra's list of inherited files
    if not node:
        return []
    if "# @package _global_" not in text:
        node = {file.parent.name: node}
    return list(leaves(node))


def repeats(group: Path) -> tuple[int, int]:
    """Return the number of lines that two or more files of a group have, and the number of all its lines."""
    counts: Counter[tuple[str, str]] = Counter()
    for file in group.glob("*.yaml"):
        counts.update(own_lines(file))
    repeated = sum(count for count in counts.values() if count > 1)
    return repeated, counts.total()


def main(argv: list[str]) -> int:
    folder = Path(__file__).resolve().parents[1] / "conf"
    if argv:
        folder = Path(argv[0])
    print(f"{'group':<12}{'repeated':>10}{'all':>8}")
    total_repeated = total_lines = 0
    for group in sorted(folder.iterdir()):
        repeated, lines = repeats(group)
        if lines or any(group.glob("*.yaml")):
            print(f"{group.name:<12}{repeated:>10}{lines:>8}")
        total_repeated += repeated
        total_lines += lines
    print(f"{'total':<12}{total_repeated:>10}{total_lines:>8}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
