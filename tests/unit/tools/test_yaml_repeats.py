"""The counter of YAML lines that repeat a sibling's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "tools/yaml_repeats.py"


def test_a_line_repeats_with_its_path_and_value_in_a_file_of_the_same_group(tmp_path: Path) -> None:
    for name, text in {
        "model/a": "defaults: [_base, _self_]\nsize: 1\nrates: [1, 2]\nnested: {depth: 1}",
        "model/b": "# @package _global_\ndefaults: [_base, _self_]\nmodel: {size: 2, rates: [1, 2]}\nseed: 1",
        "model/_base": "depth: 1\nnested: {depth: 1}",
        "data/a": "size: 1\nother: 1",
        "data/empty": "",
        "data/none": "# @package _global_\n{}",
    }.items():
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "config.yaml").write_text("size: 1")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows == [
        ["group", "repeated", "all"],
        ["data", "0", "2"],
        ["model", "4", "8"],
        ["total", "4", "10"],
    ]


def test_bases_hold_what_choices_share() -> None:
    """Two of three lines repeated a sibling's before there were base YAMLs.

    Recipes do not count. Each repeats the values of its source, so that no default acts in their place.
    """
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=60, check=True
    )
    counts = {}
    for line in done.stdout.splitlines()[1:]:
        group, repeated, every = line.split()
        counts[group] = (int(repeated), int(every))
    total, recipes = counts["total"], counts["recipe"]
    assert total[0] - recipes[0] < (total[1] - recipes[1]) / 3
