"""The choice ``finetuned`` of model, encoder and tokenizer: what the run at ``init_from`` has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from speechtrain.config.check import part_class
from speechtrain.config.resume_fields import key_of
from speechtrain.errors import ConfigError
from speechtrain.files import whole_path, yaml_text
from speechtrain.run_directory import CONFIG, run_of

_USUAL = {"model": "ctc", "encoder": "wav2vec2", "tokenizer": "auto"}  # for weights that come without a run
FINETUNED = "finetuned"
_IMPORTED = Path("encoder", "imported.yaml")  # in a folder that speechtrain export --from has written


def offer_finetuned(overrides: Sequence[str]) -> None:
    """Set Hydra's choice ``finetuned`` from the ``init_from`` among ``overrides``.

    Pretraining has no labels, so only its encoder is used. Weights without a run give the sizes that they
    name. If ``init_from`` is swept, its first value counts. Each job then composes with its own value.
    Raises RunError, ConfigError or DataError for a damaged file.
    """
    parts: dict[str, Any] = {group: {"defaults": [choice]} for group, choice in _USUAL.items()}
    typed = next((text for text in reversed(overrides) if key_of(text) == "init_from"), "init_from=null")
    parser = OverridesParser.create()
    override = parser.parse_override(typed)
    if override.is_sweep_override():
        override = parser.parse_override(f"init_from={next(iter(override.sweep_string_iterator()))}")
    name = override.value()
    place: Path | None
    if str(name).startswith("hf:"):
        from speechtrain.interop.hub import folder_of

        place = folder_of(str(name), weights=False)
    else:
        place = whole_path(str(name)) if name else None
    if place is not None and (run := run_of(place)) is not None:
        from speechtrain.config.stored import read_config  # torch

        config = read_config(run)
        has_labels = cast("Any", part_class("tokenizer", config.tokenizer)).reads_text
        taken = _USUAL if has_labels else ["encoder"]
        parts |= {group: _values(config[group], run / CONFIG) for group in taken}
    elif place is not None and (place / _IMPORTED).is_file():
        parts["encoder"] = _imported_encoder(place / _IMPORTED)
    elif place is not None and place.exists() and "encoder" not in map(key_of, overrides):
        from speechtrain.interop.weights import read_nodes  # torch

        parts |= read_nodes(place)
    for group, node in parts.items():
        ConfigStore.instance().store(group=group, name=FINETUNED, node=node)


def _imported_encoder(path: Path) -> Any:
    """Return the encoder's keys, which ``speechtrain export --from`` has written to ``path``."""
    try:
        node = yaml.safe_load(yaml_text(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return _values(node, path)


def _values(node: Any, source: Path) -> Any:
    """A part of another run, or of imported weights. Raises ConfigError unless it consists of values."""
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node)
    if not isinstance(node, dict) or "${" in str(node):
        raise ConfigError(f"{source}: it reads the environment or another key. Write values there")
    if "defaults" in node:
        raise ConfigError(f"{source}: it has a key 'defaults', which would choose other parts. Remove it")
    return node
