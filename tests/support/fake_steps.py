"""Run the whole step of configs on the fake device: ``python -m tests.support.fake_steps "KEY=VALUE …" …``.

It prints a line for each argument: ``ok``, or the error.
"""

from __future__ import annotations

import sys

from speechtrain.errors import SpeechtrainError
from speechtrain.rank import fake_step
from speechtrain.runs.compose import compose


def main() -> None:
    for line in sys.argv[1:]:
        try:
            fake_step.run(compose(line.split()), [(2, 8_000, 4)])
            print("ok", flush=True)
        except SpeechtrainError as error:
            print(error, flush=True)


if __name__ == "__main__":
    main()
