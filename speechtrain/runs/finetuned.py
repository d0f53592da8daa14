"""The choice ``finetuned`` of model, encoder and tokenizer. It has the values of the run at ``init_from``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from speechtrain.config.check import part_class
from speechtrain.config.resume_fields import key_of_override
from speechtrain.errors import ConfigError
from speechtrain.files import absolute_path, yaml_text
from speechtrain.run_directory import CONFIG, run_of

_DEFAULTS = {"model": "ctc", "encoder": "wav2vec2", "tokenizer": "auto"}  # for weights without a run
FINETUNED = "finetuned"
_IMPORTED = Path("encoder", "imported.yaml")  # in a folder that speechtrain export --from has written


def offer_finetuned(overrides: Sequence[str]) -> None:
    """Set Hydra's choice ``finetuned`` from the ``init_from`` among ``overrides``.

    If ``init_from`` is swept, its first value counts. Each job then composes with its own value. Raises
    RunError, ConfigError or DataError for a damaged file.
    """
    nodes: dict[str, Any] = {group: {"defaults": [choice]} for group, choice in _DEFAULTS.items()}
    weights = _initial_weights(overrides)
    if weights is not None:
        nodes |= _nodes_of(weights, is_encoder_set="encoder" in map(key_of_override, overrides))
    for group, node in nodes.items():
        ConfigStore.instance().store(group=group, name=FINETUNED, node=node)


def _initial_weights(overrides: Sequence[str]) -> Path | None:
    """Return the path of the last ``init_from`` among ``overrides``, or None without one."""
    texts = [text for text in overrides if key_of_override(text) == "init_from"]
    if not texts:
        return None
    parser = OverridesParser.create()
    override = parser.parse_override(texts[-1])
    if override.is_sweep_override():
        override = parser.parse_override(f"init_from={next(iter(override.sweep_string_iterator()))}")
    name = override.value()
    if str(name).startswith("hf:"):
        from speechtrain.interop.hub import folder_of

        return folder_of(str(name), weights=False)
    return absolute_path(str(name)) if name else None


def _nodes_of(weights: Path, *, is_encoder_set: bool) -> dict[str, Any]:
    """Return the nodes of the groups that the weights decide.

    A run without labels, which is pretraining, decides only the encoder. Weights without a run give the sizes
    that they name, unless the command sets the encoder.
    """
    run = run_of(weights)
    if run is not None:
        from speechtrain.config.stored import read_config  # imports torch

        config = read_config(run)
        has_labels = cast("Any", part_class("tokenizer", config.tokenizer)).reads_text
        groups = _DEFAULTS if has_labels else ["encoder"]
        return {group: _checked_node(config[group], run / CONFIG) for group in groups}
    if (weights / _IMPORTED).is_file():
        return {"encoder": _imported_encoder(weights / _IMPORTED)}
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
    """Return a node of another run or of imported weights. Raises ConfigError if it refers to other keys."""
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node)
    if not isinstance(node, dict) or "${" in str(node):
        raise ConfigError(f"{source}: it reads the environment or another key. Write values there")
    if "defaults" in node:
        raise ConfigError(f"{source}: it has a key 'defaults', which would choose other parts. Remove it")
    return node
