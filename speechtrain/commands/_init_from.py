"""The choice ``finetuned`` of model, encoder and tokenizer: what the run at ``init_from`` has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser

from speechtrain.commands._find_run import find_run
from speechtrain.config.check import part_class
from speechtrain.config.resolved import of_a_stranger
from speechtrain.config.resume_fields import key_of
from speechtrain.errors import ConfigError
from speechtrain.files import whole_path, yaml_text
from speechtrain.run_directory import CONFIG, run_of

_USUAL = {"model": "ctc", "encoder": "wav2vec2", "tokenizer": "auto"}  # for weights that come without a run
_IMPORTED = Path("encoder", "imported.yaml")  # in a folder that speechtrain-export --from has written


def _run_with(overrides: Sequence[str]) -> Path | None:
    """The existing run that these overrides continue."""
    typed = next((text for text in reversed(overrides) if key_of(text) == "run_dir"), "")
    place = whole_path(typed.partition("=")[2]) if typed else find_run(overrides, None)
    return place if place is not None and (place / CONFIG).is_file() else None


def offer_finetuned(overrides: Sequence[str]) -> None:
    """Set the choice ``finetuned`` of this composition from the ``init_from`` among ``overrides``.

    Of pretraining, which has no labels, only the encoder is taken, and of weights without a run the sizes
    that they name. Raises RunError, ConfigError or DataError for a damaged file.
    """
    parts: dict[str, Any] = {group: {"defaults": [choice]} for group, choice in _USUAL.items()}
    typed = next((text for text in reversed(overrides) if key_of(text) == "init_from"), "init_from=null")
    name = OverridesParser.create().parse_override(typed).value()
    place: Path | None
    if str(name).startswith("hf:"):
        from speechtrain.interop.hub import folder_of

        # a run that exists has its settings, so that continuing it needs no network
        known = _run_with(overrides)
        place = known if known is not None else folder_of(str(name), weights=False)
    else:
        place = whole_path(str(name)) if name else None
    if place is not None and (run := run_of(place)) is not None:
        from speechtrain.train_rank import read_config  # torch

        config = read_config(run)
        has_labels = cast("Any", part_class("tokenizer", config.tokenizer)).reads_text
        taken = _USUAL if has_labels else ["encoder"]
        parts |= {group: of_a_stranger(config[group], run / CONFIG) for group in taken}
    elif place is not None and (place / _IMPORTED).is_file():
        try:
            node = yaml.safe_load(yaml_text(place / _IMPORTED))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{place / _IMPORTED} cannot be read: {error}") from None
        parts["encoder"] = of_a_stranger(node, place / _IMPORTED)
    elif place is not None and place.exists() and "encoder" not in map(key_of, overrides):
        from speechtrain.interop.weights import read_nodes  # torch

        parts |= read_nodes(place)
    for group, node in parts.items():
        ConfigStore.instance().store(group=group, name="finetuned", node=node)
