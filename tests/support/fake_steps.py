"""Run whole steps on the fake device: ``python -m tests.support.fake_steps "KEY=VALUE … device=NAME" …``.

It prints a line for each argument: ``ok``, or the error.
"""

from __future__ import annotations

import gc
import sys
from functools import cache

from omegaconf import DictConfig

from speechtrain.errors import SpeechtrainError
from speechtrain.rank import fake_step
from speechtrain.runs.compose import compose


@cache
def config_of(line: str) -> DictConfig:
    return compose(line.split())


def main() -> None:
    gc.disable()  # The collector would search the many small objects of the steps, a tenth of the time.
    for line in sys.argv[1:]:
        network, device = line.split(" device=")
        config = config_of(network).copy()
        config.device = config_of(f"device={device}").device
        try:
            fake_step.run(config, [(2, 4_000, 2)])
            print("ok", flush=True)
        except SpeechtrainError as error:
            print(error, flush=True)


if __name__ == "__main__":
    main()
