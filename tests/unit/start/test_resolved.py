"""The config in a file of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechtrain.errors import ConfigError
from speechtrain.run_directory import is_storable, with_digest
from speechtrain.start.compose import compose
from speechtrain.start.resolved import dump, load, with_absolute_path


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


@pytest.mark.parametrize(
    ("default", "absolute"),
    [
        ("null", "null"),
        (" NULL ", " NULL "),
        ("nullable/train", "'{folder}/nullable/train'"),
        (" a/../b", "'{folder}/b'"),
        ("'a b'", "'{folder}/a b'"),
        ('"a b"', "'{folder}/a b'"),
        ("'null'", "'{folder}/null'"),
        ("'a,b'", "'{folder}/a,{folder}/b'"),
        ("''", "''"),
        ("'/a'", "'/a'"),
        ("hf:NAME", "'hf:NAME'"),
        ("'hf:NAME'", "'hf:NAME'"),
        ("'https://host/a'", "'https://host/a'"),
        ("${seed}", "${seed}"),
    ],
)
def test_the_default_of_a_reference_follows_the_rule_of_all_paths(
    default: str, absolute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reference = with_absolute_path(f"${{oc.env:NOT_SET_,{default}}}")
    assert reference == f"${{oc.env:NOT_SET_,{absolute.replace('{folder}', str(tmp_path))}}}"
    assert with_absolute_path(reference) == reference
    if default != "${seed}":
        assert is_storable(reference)
