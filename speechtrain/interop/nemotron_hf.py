"""The parts of Hugging Face's Nemotron (``nemotron_asr_streaming``) that Parakeet does not have.

Nemotron is a transducer whose encoder is NeMo's cache-aware FastConformer (Noroozi et al., ICASSP 2024). In
its config, a chunk is ``num_lookahead_tokens`` + 1 frames. A frame attends to its chunk and to the whole
chunks among the ``sliding_window`` - 1 frames before the chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speechtrain.encoders.fastconformer import FastConformer
from speechtrain.interop.pretrained import not_exportable

MODEL_TYPE = "nemotron_asr_streaming"
_MOST_HALVINGS = 10


def _subsampling_rules() -> dict[str, str]:
    """Return the foreign prefixes of the subsampling's parameters, by our prefixes.

    After the first convolution, each halving is a depthwise convolution, a pointwise one and ReLU.
    """
    layers = "encoder.subsampling.layers"
    rules = {f"{layers}.0.": "encoder.subsampling.conv_in."}
    for number in range(_MOST_HALVINGS):
        depthwise = 2 + 3 * number
        rules[f"{layers}.{depthwise}."] = f"{layers}.{number}.depthwise_conv."
        rules[f"{layers}.{depthwise + 1}."] = f"{layers}.{number}.pointwise_conv."
    return rules


RULES = _subsampling_rules()
"""The foreign prefixes of the parameters whose names differ from those in Parakeet, by our prefixes."""


def encoder_arguments(encoder: Mapping[str, Any], processor: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``FastConformer`` for the settings of the encoder and of the processor.

    transformers' processor chooses the lookahead of each call, so its settings come first.
    """
    window = int(encoder.get("sliding_window", 71))
    lookahead = encoder.get("default_num_lookahead_tokens", 13)
    lookahead = processor.get("default_num_lookahead_tokens", lookahead)
    lookaheads = processor.get("supported_num_lookahead_tokens") or [lookahead]
    return {
        "causal": True,
        "context": _context(window, int(lookahead)),
        "contexts": [_context(window, int(number)) for number in lookaheads],
    }


def _context(window: int, lookahead: int) -> list[int]:
    """Return our context [left, chunk, right] for a sliding window and a lookahead in frames."""
    chunk = lookahead + 1
    left = (window - 1) // chunk * chunk
    return [left, chunk, 0]


def encoder_settings(encoder: FastConformer) -> dict[str, int]:
    """Return the settings of a causal encoder's attention.

    Raises ConfigError for a context that the format cannot store.
    """
    contexts = [encoder.context, *(encoder.contexts or ())]
    lefts = [context[0] for context in contexts if context is not None]
    window = max(lefts, default=0) + 1
    for context in contexts:
        if context is None or list(context) != _context(window, context[1] - 1):
            raise not_exportable(
                f"encoder.causal=true with context {context} (each must be [left, chunk, 0], with the same "
                "left, which chunk divides)"
            )
    assert encoder.context is not None
    return {"sliding_window": window, "default_num_lookahead_tokens": encoder.context[1] - 1}


def lookaheads(encoder: FastConformer) -> list[int]:
    """Return the lookahead of each context with which ``encoder`` is trained."""
    contexts = encoder.contexts or [encoder.context]
    return [context[1] - 1 for context in contexts if context is not None]
