"""The config in a file of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechtrain.errors import ConfigError
from speechtrain.run_directory import with_digest
from speechtrain.start.compose import compose
from speechtrain.start.resolved import dump, load


@pytest.mark.parametrize("number", ["1", "4", "'3'", "3.5", "null", "1e400"])
def test_load_refuses_another_format_in_one_line(tmp_path: Path, number: str) -> None:
    text = dump(compose(["recipe=demo"]))
    _, _, content = text.partition("\n")
    path = tmp_path / "config.yaml"
    path.write_text(with_digest(content.replace("format: 3\n", f"format: {number}\n", 1)))
    with pytest.raises(
        ConfigError, match=r"config\.yaml has format .*, which this version does not read\. "
    ) as caught:
        load(path)
    assert "\n" not in str(caught.value)
