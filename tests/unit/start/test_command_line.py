"""Random command lines, 60 or ``$FUZZ`` of them. Each passes the config check, or is refused in one line."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from speechtrain.errors import ConfigError, SpeechtrainError, one_line
from speechtrain.start import compose as composition
from speechtrain.start.check_keys import check
from speechtrain.start.command_line import check_command, check_flags, read_command, translate_arguments
from speechtrain.start.compose import override_value
from speechtrain.start.resolved import with_absolute_path
from speechtrain.start.targets import ALLOW_TARGETS

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
def test_compose_and_check_refuse_without_a_traceback(argv: list[str]) -> None:
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


def test_compose_and_check_accept_some_random_command_lines() -> None:
    total = sum(OUTCOMES.values())
    if total == 0:
        pytest.skip("test_compose_and_check_refuse_without_a_traceback has not run")
    assert OUTCOMES["accepted"] >= total // 50
    assert OUTCOMES["refused"] >= total // 10


def test_compose_and_check_do_not_hide_programming_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: DictConfig) -> None:
        raise KeyError("seed")

    monkeypatch.setattr("speechtrain.start.check_keys.resolve", broken)
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


NAMES = (
    *("My recordings (2026)", "Anna's talks", "[final]", "c#1", "lang=de", "{x}", 'quote"d', "Smith, Anna"),
    *("1e3", "null", "a\\'b", "ends\\", "$5", "Zürich 東京", "~tilde", "-dash", " space ", "a\tb"),
)


@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_folder_is_read_as_it_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    keys = ("data.train", "data.valid.dev", "run_dir", "init_from", "data.cache", "augment.noise")
    command = read_command([f"{key}={name}" for key in keys])
    values = [override_value(text) for text in command.overrides]
    assert values == [name] * len(keys)
    assert [with_absolute_path(value) for value in values] == [str(tmp_path / name)] * len(keys)
    assert command.run_dir == tmp_path / name


def test_a_run_directory_has_any_name_and_a_list_stays_a_list() -> None:
    for name in NAMES:
        quoted_by_user = name == "null"  # ``run_dir=null`` is the run directory that follows from the keys.
        expected = None if quoted_by_user else name
        assert override_value(read_command([f"run_dir={name}"]).overrides[0]) == expected
    texts = ["run_dir='a b'", "data.train=[a,b]", "data.train={a: b}", "data.train=a,b", "data.train='a b'"]
    values = [override_value(text) for text in read_command(texts).overrides]
    assert values == ["a b", ["a", "b"], {"a": "b"}, ["a", "b"], "a b"]
    swept = read_command(["-m", "model=rnnt,ctc", "trainer.max_steps=1,2", "device=glob(*)"])
    assert swept.overrides == ["model=rnnt,ctc", "trainer.max_steps=1,2", "device=glob(*,exclude=_*)"]


def test_the_home_folder_may_be_written_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    (run_dir / "run.json").write_text("{}")
    texts = ["data.train=~/corpus", "decoder.lm=~/a (1).arpa", "run_dir=~/new", "data.valid.dev=~/a b"]
    (tmp_path / "a (1).arpa").touch()
    values = [override_value(text) for text in read_command(texts).overrides]
    assert values == [f"{tmp_path}/{name}" for name in ("corpus", "a (1).arpa", "new", "a b")]
    assert read_command(["~/a run"]).run_dir == run_dir


def test_texts_beyond_ascii_may_be_in_lists_and_mappings() -> None:
    texts = {
        "decoder.hotwords=[Zürich,东京]": ["Zürich", "东京"],
        "decoder.hotwords=[ New York , 'São, Paulo',\"naïve\", Łódź]": [
            "New York",
            "São, Paulo",
            "naïve",
            "Łódź",
        ],
        "data.train={a: {path: Zürich.csv, weight: 3}}": {"a": {"path": "Zürich.csv", "weight": 3}},
        "data.train=[é,{path: ß}]": ["é", {"path": "ß"}],
    }
    for text, value in texts.items():
        assert override_value(translate_arguments([text])[0]) == value


@pytest.mark.parametrize(
    "text", ["data.train=My rec (1)", "data.train=Anna's", 'decoder.lm=a"b', "data.train=[a", "seed=$(x)"]
)
def test_the_cure_for_a_text_that_cannot_be_read_can_be_typed(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as refusal:
        override_value(read_command([text]).overrides[0])
    cure = str(refusal.value).partition("write the value as a text: ")[2]
    (typed,) = shlex.split(cure)
    assert override_value(read_command([typed]).overrides[0]) == text.partition("=")[2]


def test_the_cures_for_a_path_without_a_key_can_be_typed(tmp_path: Path) -> None:
    folder = tmp_path / "Anna's (1)"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"run\.json is missing") as refusal:
        read_command([str(folder)])
    words = shlex.split(str(refusal.value).partition("Recordings are ")[2].replace(",", ""))
    typed = [word for word in words if "=" in word]
    assert [override_value(text) for text in read_command(typed).overrides] == [
        "manifest",
        *[str(folder)] * 2,
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config-path", "/a/b"], r"^--config-path: write a recipe"),
        (["recipe=demo", "--config-name", "my/recipe"], r"^--config-name: write a recipe"),
        (["--max-steps", "/a/b"], r"^unknown option --max-steps: write trainer\.max_steps=VALUE"),
        (["--no-such-option", "/a/b"], r"^unknown option --no-such-option"),
    ],
)
def test_an_option_is_refused_before_the_path_after_it(arguments: list[str], message: str) -> None:
    command = read_command(arguments)  # Ranks that wait for rank 0 read the same arguments without an error.
    with pytest.raises(ConfigError, match=message):
        check_command(command)
