"""The user's own YAML files that a run stores: a stranger's run may hold any text."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechtrain.errors import ConfigError
from speechtrain.start.compose import compose_with_choices
from speechtrain.start.resume import _file_changes
from speechtrain.start.user_yaml import text_of, user_yaml_files, values_of

LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 10)
)


DEEP = "a: " + "[" * 2_000 + "]" * 2_000
TAG = "a: !!python/object/apply:os.system ['x']\n"


@pytest.mark.parametrize("text", ["[1]", "a: [\n", TAG, DEEP])
def test_values_of_refuses_a_text_of_another_kind(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        values_of("optimizer/mine", text)


def test_a_stored_text_with_aliases_is_refused(tmp_path: Path) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("a: &a [1]\nb: *a\n")
    assert values_of("optimizer/mine", text_of(str(tmp_path), "optimizer/mine")) == {
        "optimizer.a": [1],
        "optimizer.b": [1],
    }
    with pytest.raises(ConfigError, match=r"optimizer/mine\.yaml cannot be read: it has the alias \*a0"):
        _file_changes(str(tmp_path), {"optimizer/mine": LAUGHS})


def test_values_of_keeps_references_as_they_are_written() -> None:
    text = "peak: ${optimizer.lr}\nb: {c: 1}\n"
    of_group = {"schedule.peak": "${optimizer.lr}", "schedule.b.c": 1}
    assert values_of("schedule/mine", text) == of_group
    assert values_of("recipe/mine", f"# @package _global_\n{text}") == {"peak": "${optimizer.lr}", "b.c": 1}


def test_text_of_is_empty_for_a_name_that_no_file_has(tmp_path: object) -> None:
    assert text_of(str(tmp_path), "model/\0x") == ""


def test_a_file_with_the_name_of_a_shipped_one_is_not_used_and_a_line_says_so(tmp_path: Path) -> None:
    for group, name in (("optimizer", "adamw"), ("decoder", "mine")):
        (tmp_path / group).mkdir()
        (tmp_path / group / f"{name}.yaml").write_text("_target_: speechtrain.decoding.greedy.Greedy\n")
    overrides = ["optimizer=adamw", "decoder@final_decoder=mine"]
    config, choices, notices = compose_with_choices(overrides, str(tmp_path))
    assert config.optimizer._target_.endswith("AdamW")
    assert notices == [
        f"{tmp_path}/optimizer/adamw.yaml is not used, because optimizer=adamw is the choice of speechtrain. "
        "Rename the file"
    ]
    assert [*user_yaml_files(choices, str(tmp_path))] == ["decoder/mine"], "the run stores what it uses"
