"""Run whole steps on the fake device: ``python tests/rehearsal/fake_steps.py "KEY=VALUE … device=NAME" …``.

It prints a line for each argument: ``ok``, or the error.
"""

from __future__ import annotations

import gc
import sys
from functools import cache
from pathlib import Path

from omegaconf import DictConfig, open_dict

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from speechtrain.errors import SpeechtrainError
from speechtrain.start.compose import compose
from tools.rehearsal import fake_step


@cache
def config_of(line: str) -> DictConfig:
    return compose(line.split())


def make_shallow(encoder: DictConfig) -> None:
    """Leave two layers, or two convolutions of one block of each kind. Others repeat their operations."""
    for key in ("layers", "pre_layers", "post_layers", "repeat"):
        if key in encoder:
            encoder[key] = min(2, encoder[key])
    for block in encoder.get("blocks", []):
        block.pop("times", None)


def main() -> None:
    gc.disable()  # The collector would search the many small objects of the steps, a tenth of the time.
    for line in sys.argv[1:]:
        network, device = line.split(" device=")
        config = config_of(network).copy()
        config.device = config_of(f"device={device}").device
        with open_dict(config):
            make_shallow(config.encoder)
        try:
            fake_step.run(config, [(2, 4_000, 2)])
            print("ok", flush=True)
        except SpeechtrainError as error:
            print(error, flush=True)


if __name__ == "__main__":
    main()
