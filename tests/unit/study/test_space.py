from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from speechtrain.errors import ConfigError
from speechtrain.study.space import first_assignments, grid, override_texts, split_overrides


def space_of(*texts: str):
    return split_overrides(OverridesParser.create().parse_overrides(list(texts)))


def test_split_overrides_reads_every_form_of_hydra() -> None:
    fixed, space = space_of(
        "recipe=fsdd",
        "optimizer.lr=tag(log,interval(1e-3,1e-2))",
        "schedule.warmup_steps=range(20,200)",
        "encoder.layers=int(interval(1,10))",
        "data.batch.count=tag(log,range(1,65))",
        "encoder.dropout=range(0,0.5,0.1)",
        "model=rnnt,ctc",
        "augment=choice(none,small)",
    )
    assert fixed == ["recipe=fsdd"]
    assert space == {
        "optimizer.lr": FloatDistribution(1e-3, 1e-2, log=True),
        "schedule.warmup_steps": IntDistribution(20, 199),
        "encoder.layers": IntDistribution(1, 10),
        "data.batch.count": IntDistribution(1, 64, log=True),
        "encoder.dropout": FloatDistribution(0, 0.4, step=0.1),
        "model": CategoricalDistribution(["rnnt", "ctc"]),
        "augment": CategoricalDistribution(["none", "small"]),
    }


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("a=tag(ln,interval(1,2))", "the only tag is log"),
        ("a=tag(log,choice(1,2))", "needs an interval"),
        ("a=range(5,1)", "start below its end"),
        ("a=tag(log,range(1,2,0.5))", "needs integers"),
        ("a=tag(log,interval(0,1))", "low"),
    ],
)
def test_split_overrides_names_the_sweep_that_is_no_distribution(text: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=rf"^a=.*{cause}"):
        space_of(text)


def test_grid_is_every_combination_and_needs_discrete_values() -> None:
    _, space = space_of("a=range(1,4)", "b=x,y", "c=range(0,0.3,0.1)")
    points = grid(space)
    assert len(points) == 3 * 2 * 3
    assert points[0] == {"a": 1, "b": "x", "c": 0.0}
    assert points[-1] == {"a": 3, "b": "y", "c": pytest.approx(0.2)}
    with pytest.raises(ConfigError, match=r"^a: .*grid"):
        grid(space_of("a=interval(0,1)")[1])


def test_override_texts_give_hydra_the_value_that_was_drawn() -> None:
    _, space = space_of("a=choice('x, y',z)")
    (text,) = override_texts({"a": space["a"].choices[0]})
    (override,) = OverridesParser.create().parse_overrides([text])
    assert override.value() == "x, y"


SEARCHED = (
    "data.batch.count=choice(4,8)",
    "optimizer.lr=1e-3,3e-3",
    "encoder.dropout=interval(0,0.5)",
    "steps=range(0,100,10)",
    "model=rnnt,ctc",
)


def test_first_assignments_have_values_of_the_space() -> None:
    _, space = space_of(*SEARCHED)
    points = [
        {"data.batch.count": 8, "optimizer.lr": 0.003},
        {"encoder.dropout": 0, "steps": 20, "model": "ctc"},
    ]
    assert first_assignments(space, points, OverridesParser.create()) == [
        {"data.batch.count": "8", "optimizer.lr": "0.003"},
        {"encoder.dropout": 0, "steps": 20, "model": "ctc"},
    ]


@pytest.mark.parametrize(
    ("point", "cause"),
    [
        ({"rate": 1}, "rate"),
        ({"data.batch.count": 5}, "5"),
        ({"encoder.dropout": 0.6}, "0.6"),
        ({"encoder.dropout": "much"}, "much"),
        ({"steps": 15}, "15"),
        ("steps", r"it is a list such as \[\{optimizer.lr: 3e-3\}\]"),
    ],
)
def test_first_assignments_refuse_a_value_outside_the_space(point: object, cause: str) -> None:
    _, space = space_of(*SEARCHED)
    with pytest.raises(ConfigError, match=f"^hydra.sweeper.first.*{cause}"):
        first_assignments(space, [point], OverridesParser.create())
