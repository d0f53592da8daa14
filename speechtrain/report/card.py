"""The model card of a run: the README.md of an export folder, in the form of Hugging Face's hub.

Names and texts of a run may be a stranger's. Each is put on one line, and the template escapes its Markdown.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from speechtrain.errors import MALFORMED, ConfigError, DataError, escape_controls, one_line, shorten
from speechtrain.files import holds_secret, read_json
from speechtrain.report.run import Run
from speechtrain.run_directory import finite_number, read_device, read_manifest
from speechtrain.tracking.console import duration

CARD = "README.md"
UNKNOWN_LICENCE = "unknown"
"""The hub's identifier of a licence that is not stated."""

# The architectures of transformers that recognise speech, and the class of a run with the same outputs.
_RECOGNISERS = {
    "NemotronAsrStreamingForRNNT": "RNNT",
    "ParakeetForCTC": "CTC",
    "ParakeetForRNNT": "RNNT",
    "ParakeetForTDT": "RNNT",
    "Wav2Vec2ForCTC": "CTC",
}
_RATES = ("wer", "cer", "ser")
_RECOGNITION = "automatic-speech-recognition"  # the hub's name of the task
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})?|multilingual")
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,49}")
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|#~$&])")  # A backslash makes these characters literal.
_MOST_CHARACTERS = 200  # of a name on the page
_MOST_COMMAND = 8_000  # characters of the command
_MOST_RATES = 200  # on the page


@dataclass(frozen=True)
class Rate:
    """An error rate of the model on one set."""

    set_name: str
    decoder: str
    metric: str  # wer, cer or ser
    value: float  # a fraction
    interval: str = ""  # the 95 % confidence interval in percent, "LOW to HIGH", or empty if it is unknown
    utterances: int = 0

    @property
    def percent(self) -> float:
        return round(100 * self.value, 2)

    @property
    def key(self) -> tuple[str, str, str, float]:
        return self.set_name, self.decoder, self.metric, self.percent


@dataclass(frozen=True)
class CardOptions:
    """The entries of a card that the run does not have."""

    form: str = "huggingface"  # the format of the folder
    name: str = ""  # of the model on the hub, or empty for a local folder
    licence: str = UNKNOWN_LICENCE
    languages: tuple[str, ...] = ()  # by default, the languages of the sets of data.train
    evaluated_rates: tuple[Rate, ...] = ()  # of speechtrain evaluate

    def __post_init__(self) -> None:
        if not _LICENCE.fullmatch(self.licence):
            example = "such as apache-2.0, cc-by-4.0 or other"
            raise ConfigError(f"--licence {self.licence}: name an identifier of the hub, {example}")
        for language in self.languages:
            if not _LANGUAGE.fullmatch(language):
                raise ConfigError(f"--language {language}: name ISO 639 codes, such as en or en,mi")


def card(run: Run, checkpoint: Path, folder: Path, options: CardOptions) -> str:
    """Return the card of the export in ``folder``, which has the weights of ``checkpoint``."""
    # The class of transformers that loads the folder, if one does.
    architectures = read_json(folder / "config.json").get("architectures")
    architecture = str(architectures[0]) if architectures else ""
    # A folder of another architecture has only a part of the model, such as its encoder.
    is_whole_model = not architecture or _RECOGNISERS.get(architecture) == _class_name(run, "model")
    rates = _rates(run, checkpoint, options.evaluated_rates) if is_whole_model else []
    title = one_line(options.name.rpartition("/")[2] or folder.resolve().name, _MOST_CHARACTERS)
    metadata = _metadata(run, options, architecture) | _model_index(title, rates)
    front_matter = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=10**6)
    command = Markup()
    argv = run.about.argv
    if argv is not None and not holds_secret(shlex.join(argv)):
        line = shorten(escape_controls(shlex.join(argv)), _MOST_COMMAND)
        command = Markup(f"    speechtrain train {line}")  # The indentation makes it a line of code.
    environment = Environment(
        loader=PackageLoader("speechtrain.report", ""),
        trim_blocks=True,
        keep_trailing_newline=True,
        finalize=_markdown,
    )
    filters = {"part": partial(_class_name, run), "duration": duration, "number": finite_number}
    environment.filters.update(filters)
    return environment.get_template("card.md").render(
        run=run,
        device=read_device(run.folder),
        title=title,
        metadata=metadata,
        front_matter=Markup(front_matter.strip()),
        rates=rates,
        location=Markup(options.name or "."),
        command=command,
        is_whole_model=is_whole_model,
    )


def _markdown(value: Any) -> Markup:
    """Return ``value`` on one line with its Markdown escaped. ``Markup`` is unchanged."""
    if isinstance(value, Markup):
        return value
    return Markup(_MARKDOWN.sub(r"\\\1", one_line(str(value), _MOST_CHARACTERS)))


def _class_name(run: Run, part: str) -> str:
    return str(run.config.get(f"{part}._target_", "a model")).rpartition(".")[2]


def _metadata(run: Run, options: CardOptions, architecture: str) -> dict[str, Any]:
    """Return the hub's metadata without results. Languages come from ``options`` or from data.train."""
    languages = list(options.languages)
    if not languages:
        for key, value in run.config.items():
            if re.fullmatch(r"data\.train\.(.*\.)?language", key) and _LANGUAGE.fullmatch(str(value)):
                languages.append(str(value))
    metadata: dict[str, Any] = {"license": options.licence, "tags": ["speechtrain", "audio", options.form]}
    if languages:
        metadata["language"] = list(dict.fromkeys(languages))
    recognises = architecture in _RECOGNISERS or not architecture
    metadata["pipeline_tag"] = _RECOGNITION if recognises else "feature-extraction"
    if architecture:
        metadata["library_name"] = "transformers"
    return metadata


def _model_index(title: str, rates: list[Rate]) -> dict[str, Any]:
    """Return the hub's metadata of the rates, which are grouped by set."""
    if not rates:
        return {}
    results: dict[str, dict[str, Any]] = {}
    for rate in rates:
        name = one_line(rate.set_name, _MOST_CHARACTERS)
        slug = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip("-.")
        dataset = {"type": slug or "set", "name": name}
        task = {"type": _RECOGNITION, "name": "Speech recognition"}
        result = results.setdefault(name, {"task": task, "dataset": dataset, "metrics": []})
        label = one_line(f"{rate.metric.upper()} in %, {rate.decoder}", _MOST_CHARACTERS)
        result["metrics"].append({"type": rate.metric, "value": rate.percent, "name": label})
    model_index = [{"name": title, "results": list(results.values())}]
    return {"metrics": sorted({rate.metric for rate in rates}), "model-index": model_index}


def _rates(run: Run, checkpoint: Path, evaluated_rates: Iterable[Rate]) -> list[Rate]:
    """Return the error rates of the checkpoint's validation, then the evaluated rates.

    An evaluated rate replaces the equal rate of the validation, because it has an interval.
    """
    manifest = read_manifest(checkpoint)
    rates = {}
    for name, value in ((manifest and manifest.metrics) or {}).items():
        set_name, _, metric = name.rpartition("/")
        if set_name and metric in _RATES and value is not None:
            decoder = "final_decoder" if set_name.startswith("final/") else "decoder"
            rate = Rate(set_name.removeprefix("final/"), _class_name(run, decoder), metric, value)
            rates[rate.key] = rate
    for rate in evaluated_rates:
        rates[rate.key] = rate
    return list(rates.values())[:_MOST_RATES]


def read_evaluation(path: Path, checkpoint: Path) -> list[Rate]:
    """Read the error rates in the output of ``speechtrain evaluate --json``.

    Raises DataError for another file, and for an evaluation of another checkpoint.
    """
    content = read_json(path, follow=True)
    try:
        other_checkpoint = os.path.abspath(content["checkpoint"])
        rates = list(_rates_in(content))
    except (AttributeError, KeyError, TypeError, *MALFORMED):
        raise DataError(f"--evaluation {path} is not the output of speechtrain evaluate RUN --json") from None
    if other_checkpoint != os.path.abspath(checkpoint):
        cause = f"--evaluation {path} is of {other_checkpoint}, and the export is of {checkpoint}"
        raise DataError(f"{cause}. Run speechtrain evaluate RUN --json in this folder")
    return rates


def _rates_in(content: Mapping[str, Any]) -> Iterator[Rate]:
    overrides = [override for override in content["overrides"] if not override.startswith("device")]
    decoder = " ".join((content["decoder"], *overrides))
    for set_name, metrics in content["metrics"].items():
        mistakes = content["mistakes"].get(set_name, {})
        for metric, value in metrics.items():
            if metric in _RATES and value is not None:
                bounds = mistakes.get(f"{metric}_interval") or ()
                interval = " to ".join(f"{100 * float(bound):.2f}" for bound in bounds)
                utterances = int(mistakes.get("utterances", 0))
                yield Rate(set_name, decoder, metric, float(value), interval, utterances)
