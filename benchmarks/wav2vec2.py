"""Time of wav2vec 2.0's convolutional extractor, forward and backward, in each form of its convolutions.

    python benchmarks/wav2vec2.py           # base and large, fp32, and bf16 where oneDNN has it
    python benchmarks/wav2vec2.py --smoke   # a thin extractor, seconds
    python benchmarks/wav2vec2.py --rows 4 --seconds 10 --rounds 5 --threads 2 --fp32-matmul medium

Contenders take turns (A B C A B C ...), since other work on the machine comes and goes; ratios are
medians of each round's ratio to conv1d of the same precision and round. Times are processor time (of
user and kernel), which with one thread is what wall time would be on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

from speechtrain.nn.conv_extractor import FORMS, ConvExtractor

BASELINE = "conv1d"


def layers(channels: int) -> list[list[int]]:
    return [[channels, 10, 5], *[[channels, 3, 2]] * 4, *[[channels, 2, 2]] * 2]


def step(extractor: ConvExtractor, audio: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Processor seconds of forward and of backward."""
    extractor.zero_grad(set_to_none=True)
    begin = time.process_time()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        features = extractor(audio)
    middle = time.process_time()
    features.backward(torch.ones_like(features))
    return middle - begin, time.process_time() - middle


def compare(norm: str, dtype: torch.dtype, audio: Tensor, channels: int, rounds: int) -> None:
    contenders = {}
    for form in FORMS:
        torch.manual_seed(0)
        contenders[form] = ConvExtractor(layers(channels), norm == "layer", norm, form=form)
        step(contenders[form], audio, dtype)  # first calls build oneDNN's kernels
    times: dict[str, list[tuple[float, float]]] = {form: [] for form in contenders}
    for _ in range(rounds):
        for form, extractor in contenders.items():
            times[form].append(step(extractor, audio, dtype))
    precision = str(dtype).removeprefix("torch.")
    for form, measured in times.items():
        forward, backward = (statistics.median(column) for column in zip(*measured, strict=True))
        pairs = zip(measured, times[BASELINE], strict=True)
        ratio = statistics.median(sum(ours) / sum(theirs) for ours, theirs in pairs)
        print(f"| {norm} | {precision} | {form} | {forward:.3f} | {backward:.3f} | {ratio:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="of audio in a row")
    parser.add_argument("--channels", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--norms", nargs="+", default=["group", "layer"], choices=["group", "layer"])
    parser.add_argument("--fp32-matmul", default="highest", choices=["highest", "high", "medium"])
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    if given.smoke:
        given.rows, given.seconds, given.channels, given.rounds = 1, 1.0, 32, 2
    torch.set_num_threads(given.threads)
    torch.set_float32_matmul_precision(given.fp32_matmul)
    precisions = [torch.float32]
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        precisions.append(torch.bfloat16)
    torch.manual_seed(0)
    audio = torch.randn(given.rows, int(given.seconds * 16000)) * 0.1
    print(f"{given.rows} x {given.seconds} s, {given.channels} channels, {given.threads} thread(s), "
          f"fp32 matmul precision {given.fp32_matmul}, torch {torch.__version__}")  # fmt: skip
    print("| norm | precision | form | forward, s | backward, s | of conv1d |\n|---|---|---|---|---|---|")
    for norm in given.norms:
        for dtype in precisions:
            compare(norm, dtype, audio, given.channels, given.rounds)


if __name__ == "__main__":
    main()
