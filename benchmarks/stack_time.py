"""Time and memory of an RNN-T training step by the encoder's StackTime factor.

    python benchmarks/stack_time.py            # MLPerf's network with factors 2, 4 and 8
    python benchmarks/stack_time.py --smoke    # a small network, seconds

StackTime concatenates successive frames, so the layers behind it and the joint run over fewer frames. Each
measurement is a process, as in ``benchmarks/memory.py``. The factors take turns (A B C A B C ...). The
ratios are medians of each round's ratio to the first factor of the same round.
"""

from __future__ import annotations

import argparse
import statistics

from memory import measure_in_process

FULL = ("model=rnnt_mlperf", "augment=none")
SMALL = ("model=rnnt", "augment=none")


def options_of_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--factors", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a row")
    parser.add_argument("--labels", type=float, default=4.0, help="labels per second")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a process")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.rows, options.seconds, options.rounds, options.steps = 2, 1.0, 1, 1
    return options


def measure(options: argparse.Namespace) -> dict[int, list[tuple[float, float]]]:
    """Return MiB and seconds of each round, by factor."""
    network = SMALL if options.smoke else FULL
    lengths = (options.seconds,) * options.rows
    rounds: dict[int, list[tuple[float, float]]] = {factor: [] for factor in options.factors}
    for _ in range(options.rounds):
        for factor in options.factors:
            recipe = [*network, f"encoder.stack_time={factor}"]
            rounds[factor].append(measure_in_process(recipe, lengths, options.labels, options.steps))
    return rounds


def cells(values: list[float], base: list[float], digits: int) -> list[str]:
    """Return the median of the values, and the median of their ratios to the values of the base."""
    ratios = [value / reference for value, reference in zip(values, base, strict=True)]
    return [f"{statistics.median(values):.{digits}f}", f"{statistics.median(ratios):.2f}"]


def main() -> None:
    options = options_of_command_line()
    rounds = measure(options)
    base_memory, base_seconds = (list(column) for column in zip(*rounds[options.factors[0]], strict=True))
    print("| factor | frame, ms | MiB | ratio | s of a step | ratio |\n|---|---|---|---|---|---|")
    for factor, measurements in rounds.items():
        memory, seconds = (list(column) for column in zip(*measurements, strict=True))
        line = [
            str(factor),
            str(30 * factor),
            *cells(memory, base_memory, 0),
            *cells(seconds, base_seconds, 2),
        ]
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
