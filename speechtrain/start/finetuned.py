"""The choice ``finetuned`` of model, encoder, tokenizer and decoder, which comes from ``init_from``.

``init_from`` is a run or a folder of weights. The choice is computed, and has no YAML file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from speechtrain.errors import ConfigError, MissingPackage
from speechtrain.files import absolute_path, yaml_text
from speechtrain.overrides import key_of_override
from speechtrain.run_directory import CONFIG, run_of
from speechtrain.start.check_keys import part_class

_DEFAULTS = {"model": "ctc", "encoder": "wav2vec2", "tokenizer": "auto", "decoder": "greedy"}
"""Choices of the groups that ``init_from`` does not decide."""
FINETUNED = "finetuned"
_IMPORTED_ENCODER = Path("encoder", "imported.yaml")
"""The encoder's config in a folder that ``speechtrain export --from`` has written."""


def offer_finetuned(overrides: Sequence[str]) -> None:
    """Register the choice ``finetuned`` with Hydra, from the ``init_from`` among ``overrides``.

    If a sweep varies ``init_from``, its first value is used here. Each job later composes again with its own
    value. Raises RunError, ConfigError or DataError for a damaged file.
    """
    nodes: dict[str, Any] = {group: {"defaults": [choice]} for group, choice in _DEFAULTS.items()}
    weights = _initial_weights(overrides)
    if weights is not None:
        is_encoder_set = "encoder" in map(key_of_override, overrides)
        nodes |= _nodes_of(weights, is_encoder_set=is_encoder_set)
    for group, node in nodes.items():
        ConfigStore.instance().store(group=group, name=FINETUNED, node=node)


def _initial_weights(overrides: Sequence[str]) -> Path | None:
    """Return the path that the last ``init_from`` among ``overrides`` names, or None.

    Of a model on the Hugging Face hub, the files without the weights are downloaded first.
    """
    texts = [text for text in overrides if key_of_override(text) == "init_from"]
    if not texts:
        return None
    parser = OverridesParser.create()
    override = parser.parse_override(texts[-1])
    if override.is_sweep_override():
        first_value = next(iter(override.sweep_string_iterator()))
        override = parser.parse_override(f"init_from={first_value}")
    source = override.value()
    if str(source).startswith("hf:"):
        from speechtrain.interop.hub import settings_folder_of

        try:
            return settings_folder_of(str(source))
        except MissingPackage:
            if "dry_run=true" not in overrides:
                raise
            return None  # The dry run has the defaults of the groups, and its start prints a warning.
    return absolute_path(str(source)) if source else None


def _nodes_of(weights: Path, *, is_encoder_set: bool) -> dict[str, Any]:
    """Return the config nodes of the groups that ``weights`` decides, by group.

    - A run decides model, encoder and tokenizer. A pretraining run, which has no labels, decides only the
      encoder.
    - A folder of ``speechtrain export --from`` decides the encoder.
    - Weights of another system decide the sizes of the encoder, unless the command sets the encoder.
    """
    run_dir = run_of(weights)
    if run_dir is not None:
        from speechtrain.start.stored import read_config  # imports torch

        config = read_config(run_dir)
        has_labels = cast("Any", part_class("tokenizer", config.tokenizer)).reads_text
        groups = ["model", "encoder", "tokenizer"] if has_labels else ["encoder"]
        return {group: _checked_node(config[group], run_dir / CONFIG) for group in groups}
    imported = weights / _IMPORTED_ENCODER
    if imported.is_file():
        return {"encoder": _imported_encoder(imported)}
    if is_encoder_set or not weights.exists():
        return {}
    from speechtrain.interop.weights import read_nodes  # imports torch

    return read_nodes(weights)


def _imported_encoder(path: Path) -> Any:
    """Return the node of the encoder that ``speechtrain export --from`` has written to ``path``."""
    try:
        node = yaml.safe_load(yaml_text(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return _checked_node(node, path)


def _checked_node(node: Any, source: Path) -> Any:
    """Return ``node`` as a plain mapping. It comes from the file ``source`` of another run or of weights.

    Raises ConfigError if it refers to other keys, to the environment or to other choices of Hydra, because
    these would have other values in this run.
    """
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node)
    if not isinstance(node, dict) or "${" in str(node):
        raise ConfigError(f"{source}: it reads the environment or another key. Write values there")
    if "defaults" in node:
        raise ConfigError(f"{source}: it has a key 'defaults', which would choose other parts. Remove it")
    return node
