"""Random command lines, 60 or ``$FUZZ`` of them. Each passes the config check, or is refused in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from speechtrain.config.check import check
from speechtrain.config.targets import ALLOW_TARGETS
from speechtrain.errors import ConfigError, SpeechtrainError, one_line
from speechtrain.runs import compose as composition
from speechtrain.runs.command_line import check_flags, read_command

CONF = Path(__file__).parents[3] / "conf"
GROUPS = {
    folder.name: sorted(p.stem for p in folder.glob("[!_]*.yaml"))
    for folder in CONF.iterdir()
    if folder.is_dir()
}
GROUPS = {name: choices for name, choices in GROUPS.items() if choices}
KEYS = sorted(composition._config_keys([], None))


def _damaged(texts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Texts in which one character is removed, doubled or replaced."""

    def damage(text: str, position: int, kind: str, new_character: str) -> str:
        position %= max(1, len(text))
        character = text[position : position + 1]
        if kind == "remove":
            replacement = ""
        elif kind == "double":
            replacement = character * 2
        else:
            replacement = new_character
        return text[:position] + replacement + text[position + 1 :]

    kinds = st.sampled_from(["remove", "double", "replace"])
    return st.builds(damage, texts, st.integers(0, 60), kinds, st.characters(codec="utf-8"))


scalars = st.one_of(
    st.sampled_from(
        ["null", "true", "1", "0", "-1", "1e-3", "1e400", "nan", "inf", "abc", "''", '""', "???", "0x1"]
    ),
    st.sampled_from(
        ["${seed}", "${oc.env:HOME}", "${oc.env:NOPE_}", "${nope}", "${optimizer.lr}", "${", "$", "\\"]
    ),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=8),
)
values = st.one_of(
    scalars,
    st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(lambda items: "[" + ",".join(items) + "]"),
            st.lists(st.tuples(st.sampled_from(["a", "_target_", "x.y", ""]), inner), max_size=2).map(
                lambda items: "{" + ",".join(f"{k}: {v}" for k, v in items) + "}"
            ),
            inner.map(lambda v: f"'{v}'"),
            inner.map(lambda v: f"[{v}"),
        ),
        max_leaves=6,
    ),
    st.sampled_from(
        ["os.system", "speechtrain.models.rnnt.RNNT", "torch.nn.Linear", "torch.optim.Adam", "a.b.c"]
    ),
)
choices = st.sampled_from([f"{g}={c}" for g, names in GROUPS.items() for c in names])
keys = st.sampled_from(KEYS)
names = st.one_of(keys, _damaged(keys), st.sampled_from(sorted(GROUPS)), keys.map(lambda k: f"{k}._target_"))
overrides = st.one_of(
    choices,
    _damaged(choices),
    st.builds(
        lambda sign, name, value: f"{sign}{name}={value}",
        st.sampled_from(["", "", "", "+", "++", "~"]),
        names,
        values,
    ),
    names.map(lambda name: f"~{name}"),
    names,
    st.text(max_size=12),
)
OUTCOMES = {"refused": 0, "accepted": 0}  # the number of command lines with each outcome


def _compose_and_check(argv: list[str]) -> DictConfig:
    """Return the checked config of a command line, without a look at the machine."""
    command = read_command(argv)
    check_flags(command.flags)
    try:
        config = composition.compose(command.overrides)
    except SpeechtrainError:
        raise
    except Exception as error:
        raise composition.explain(error, command.overrides) from error
    config.run_dir = "/tmp/run"  # The command sets it too. Nothing is written there.
    check(config)
    return config


@pytest.mark.slow
@settings(
    max_examples=int(os.environ.get("FUZZ", "60")),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(st.lists(overrides, min_size=1, max_size=3))
def test_compose_and_check_refuse_command_lines_without_a_traceback(argv: list[str]) -> None:
    try:
        _compose_and_check(argv)
        OUTCOMES["accepted"] += 1
    except SpeechtrainError as error:
        OUTCOMES["refused"] += 1
        assert 2 <= error.exit_code <= 5  # noqa: PT017 - A refusal is allowed too.
        line = one_line(str(error))
        assert line, argv
        assert len(line) < 2000
        assert not line.startswith("Traceback")
    finally:
        os.environ.pop(ALLOW_TARGETS, None)


def test_compose_and_check_accept_some_of_the_random_command_lines() -> None:
    total = sum(OUTCOMES.values())
    if total == 0:
        pytest.skip("test_compose_and_check_refuse_command_lines_without_a_traceback has not run")
    assert OUTCOMES["accepted"] >= total // 50
    assert OUTCOMES["refused"] >= total // 10


def test_compose_and_check_do_not_hide_programming_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: DictConfig) -> None:
        raise KeyError("seed")

    monkeypatch.setattr("speechtrain.config.check.resolve", broken)
    with pytest.raises(KeyError):
        _compose_and_check(["seed=1"])
    with pytest.raises(ConfigError):
        _compose_and_check(["sed=1"])


@pytest.mark.parametrize("option", [["--local-rank", "1"], ["--local-rank=1"], ["--local_rank=1"]])
def test_the_option_of_torchs_older_launcher_is_ignored(
    option: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError, match=r"^unknown option --local.rank"):
        check_flags(read_command([*option, "recipe=demo"]).flags)
    monkeypatch.setenv("LOCAL_RANK", "1")
    command = read_command([*option, "recipe=demo", "-m"])
    assert (command.argv, command.flags, command.overrides) == (
        ["recipe=demo", "-m"],
        ["-m"],
        ["recipe=demo"],
    )
