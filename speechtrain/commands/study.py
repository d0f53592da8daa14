"""speechtrain study: ask for trials, store their results, import and show a study. It imports no torch."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speechtrain.commands._cli import Parser, add_command, console
from speechtrain.errors import MALFORMED, ConfigError, escape_controls
from speechtrain.files import parse_json, yaml_text
from speechtrain.study import require_optuna


def run(argv: Sequence[str]) -> int:
    """Run a subcommand and return the exit code. Raises ConfigError and RunError."""
    arguments = parser().parse_args(argv)
    require_optuna()
    arguments.function(arguments)
    return 0


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="speechtrain study",
        description="Use a study: a search for the values of keys that train best. `speechtrain train -m "
        "hydra/sweeper=study` makes one and runs its trials. A program of your own asks for values and "
        "reports the results instead.",
        examples=[
            "speechtrain study status STUDY",
            "speechtrain study import sda.yaml STUDY",
            "speechtrain study ask STUDY",
            """speechtrain study tell STUDY '{"id": 0, "values": {"WER": 0.31, "training_time": 3600}}'""",
        ],
        exit_codes="0 done, 2 usage or a wrong value, 5 no study in the folder, or a finished trial",
    )
    commands = parser.add_subparsers(
        dest="subcommand", required=True, metavar="SUBCOMMAND", parser_class=Parser
    )
    ask = _add(commands, "ask", "print the next trial as {id, assignments}, nothing if the study is full")
    ask.add_argument(
        "--worker",
        default="",
        metavar="NAME",
        help="a worker that asks again gets its unfinished trial again",
    )
    ask.set_defaults(function=_ask)
    tell = _add(commands, "tell", "store the end of a trial, {id, values} or {id, failed}", "STUDY JSON")
    tell.set_defaults(function=_tell)
    status = _add(commands, "status", "print a table of the trials")
    status.add_argument("--html", action="store_true", help="also write optuna's plots, STUDY/study.html")
    status.set_defaults(function=_status)
    imported = _add(
        commands, "import", "make a study from parameters and metrics in SigOpt's form", "FILE STUDY"
    )
    imported.add_argument("--sampler", default="tpe", help="tpe (default), random or grid")
    imported.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the draws (default 1)")
    imported.set_defaults(function=_import)
    return parser


def _add(commands: Any, name: str, meaning: str, positionals: str = "STUDY") -> Any:
    """Add the parser of a subcommand with the arguments ``positionals``, and return it."""
    subparser = add_command(commands, name, meaning, positionals, program="study")
    for positional in positionals.split():
        kind = str if positional == "JSON" else Path
        subparser.add_argument(positional.lower(), type=kind, metavar=positional)
    return subparser


def _ask(arguments: Namespace) -> None:
    """Print the next trial of a study as a JSON object."""
    from speechtrain.study.store import Study

    study = Study(arguments.study)
    trial = study.ask(arguments.worker)
    if trial is None:
        print(f"{arguments.study} has its {study.spec.n_trials} trials", file=sys.stderr)
    else:
        print(json.dumps({"id": trial.number, "assignments": trial.params}))


def _tell(arguments: Namespace) -> None:
    """Store the result of a trial, a JSON object. Raises ConfigError for another form."""
    from speechtrain.study.objectives import values_of
    from speechtrain.study.store import Study, TrialResult

    study = Study(arguments.study)
    expected_form = '{"id": 0, "values": {"NAME": VALUE}}, or {"id": 0, "failed": "CAUSE"}'
    form_error = ConfigError(f"{arguments.json[:200]}: a trial is {expected_form}")
    try:
        content = parse_json(arguments.json)
        number, values, failure = content["id"], content.get("values"), content.get("failed")
    except (AttributeError, KeyError, TypeError, *MALFORMED):
        raise form_error from None
    are_numbers = isinstance(values, dict)
    if are_numbers:
        numbers = [value for value in values.values() if type(value) in (int, float)]
        are_numbers = len(numbers) == len(values) and all(map(math.isfinite, numbers))
    if type(number) is not int or bool(failure) == are_numbers:
        raise form_error
    if failure:
        study.finish(number, TrialResult("failed", str(failure)))
    else:
        study.finish(number, TrialResult("finished"), values_of(study.spec.objectives, values))


def _status(arguments: Namespace) -> None:
    """Print the table of the trials. With ``--html``, also write a page and print its path."""
    from speechtrain.study.output import PAGE, table, write_page
    from speechtrain.study.store import Study

    study = Study(arguments.study)
    for line in table(study):
        print(escape_controls(line))
    if arguments.html:
        write_page(study)
        print(escape_controls(str(arguments.study / PAGE)))


def _import(arguments: Namespace) -> None:
    """Make a study from a YAML file in SigOpt's form, and print its size."""
    import yaml

    from speechtrain.study.objectives import Objective
    from speechtrain.study.store import Study, StudySpec

    try:
        content = yaml.safe_load(yaml_text(arguments.file))
        model = content.get("model_parameter", content)
        parameters = {str(node["name"]): _distribution(node) for node in model["parameters"]}
        objectives = []
        for node in content.get("metrics", model.get("metrics")):
            direction, threshold = node.get("objective", "maximize"), node.get("threshold")
            threshold = None if threshold is None else float(threshold)
            objectives.append(Objective(node["name"], direction, threshold))
        n_trials = int(content.get("observation_budget", StudySpec.n_trials))
    except (AttributeError, KeyError, TypeError, yaml.YAMLError, *MALFORMED) as error:
        message = f"{arguments.file}: it needs parameters (name, bounds or grid, type) and metrics"
        raise ConfigError(f"{message}: {type(error).__name__}: {error}") from None
    Study(arguments.study, StudySpec(parameters, objectives, n_trials, arguments.sampler, arguments.seed))
    sizes = f"{len(parameters)} parameters, {len(objectives)} objectives, {n_trials} trials"
    print(escape_controls(f"{arguments.study}: {sizes}"))


def _distribution(node: Mapping[str, Any]) -> Any:
    """Return optuna's distribution of a SigOpt parameter. Raises ValueError or KeyError for another form."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    choices = node.get("grid") or node.get("categorical_values")
    if choices:
        return CategoricalDistribution(list(choices))
    low, high = node["bounds"]["min"], node["bounds"]["max"]
    is_log = node.get("transformation") == "log"
    if node["type"] == "int":
        return IntDistribution(int(low), int(high), log=is_log)
    if node["type"] != "double":
        raise ValueError(f"{node['name']} has the type {node['type']}, and it must be double, int or a grid")
    return FloatDistribution(float(low), float(high), log=is_log)


main = console(run)

if __name__ == "__main__":
    main()
