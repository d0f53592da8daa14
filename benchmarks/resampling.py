"""Time and aliases of a change to 16 kHz: the filter of recordings and the short one of speed changes.

    python benchmarks/resampling.py [--seconds 10] [--rounds 25]

Both filters run once in each round, so that a busy machine slows both alike. The times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from speechtrain.data.audio import Samples, resample

RATES = (22_050, 32_000, 44_100, 48_000)
ALIAS = 8_300.0  # Hz


def tone_of(rate: int, seconds: float) -> Samples:
    times = np.arange(int(rate * seconds)) / rate
    tone: Samples = np.sin(2 * np.pi * ALIAS * times).astype(np.float32)
    return tone


def level_of(samples: Samples) -> float:
    """Return the level of a tone in dB of full scale, without the edges."""
    edge = len(samples) // 8
    power = 2 * np.square(samples[edge:-edge], dtype=np.float64).mean()
    return float(10 * np.log10(power + 1e-15))


def compare(rate: int, seconds: float, rounds: int) -> None:
    """Print the time and the alias of both filters for one rate."""
    tone = tone_of(rate, seconds)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for is_steep in times:
            start = time.perf_counter()
            resample(tone, rate, 16_000, is_steep)
            times[is_steep].append(time.perf_counter() - start)
    for is_steep, name in ((False, "short"), (True, "steep")):
        milliseconds = 1000 * statistics.median(times[is_steep]) / seconds
        level = level_of(resample(tone, rate, 16_000, is_steep))
        print(f"{rate:6}   {name}    {milliseconds:17.3f}   {level:4.0f} dB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("rate     filter   ms per s of audio   8.3 kHz")
    for rate in RATES:
        compare(rate, options.seconds, options.rounds)


if __name__ == "__main__":
    main()
