"""Time of wav2vec 2.0: a whole step and its objective against Hugging Face's, and the forms of the extractor.

    python benchmarks/wav2vec2.py                  # all three parts, base, fp32, and bf16 where oneDNN has it
    python benchmarks/wav2vec2.py step --rounds 3  # forward, backward and AdamW only (needs transformers)
    python benchmarks/wav2vec2.py --smoke          # thin, seconds
    python benchmarks/wav2vec2.py extractor --rows 4 --seconds 10 --threads 2 --fp32-matmul medium

Contenders take turns (A B C A B C ...), since other work on the machine comes and goes; ratios are
medians of each round's ratio to the baseline of the same precision and round: Hugging Face's, or for the
extractor conv1d. Processor time is of user and kernel: with one thread, what wall time would be on an
idle machine. Both models get the same audio, mask and negatives, and the published dropouts; layer
drop is off, since Hugging Face's skips a layer and ours computes it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy, apply_policy
from speechtrain.devices.cpu import CPU
from speechtrain.encoders.wav2vec2 import Wav2Vec2Encoder
from speechtrain.interop import wav2vec2_hf
from speechtrain.interop.pretrained import describe
from speechtrain.losses.contrastive import contrastive_loss
from speechtrain.models.wav2vec2 import Wav2Vec2
from speechtrain.nn.conv_extractor import CONVOLUTIONS, ConvExtractor
from speechtrain.nn.masking import SpanMask

PARTS = ("step", "objective", "extractor")
BASELINE = "conv1d"
THEIRS = "Hugging Face"
SMOKE = {"width": 48, "layers": 2, "feed_forward": 96, "heads": 4}


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
    for form in CONVOLUTIONS:
        torch.manual_seed(0)
        contenders[form] = ConvExtractor(layers(channels), norm == "layer", norm)
        autocast = dtype if dtype != torch.float32 else None
        apply_policy(contenders[form], ComputePolicy(conv=form, autocast_dtype=autocast))
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


# --- the whole step, and its objective, against Hugging Face's ------------------------------------


def make(given: argparse.Namespace) -> tuple[Wav2Vec2, Any, Batch, dict[str, Tensor]]:
    """Our task, their model of the same form, a prepared batch, and what their ``forward`` takes for it."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = SMOKE if given.smoke else {}
    encoder = Wav2Vec2Encoder(layers(given.channels), layer_drop=0.0, mask=SpanMask(), **sizes)
    task = Wav2Vec2(encoder).train()
    config = wav2vec2_hf.config_of(describe(task, {}))
    model = transformers.Wav2Vec2ForPreTraining(transformers.Wav2Vec2Config(**config)).train()
    samples = int(given.seconds * 16000)
    batch = Batch(
        audio=torch.randn(given.rows, samples) * 0.1,
        audio_lengths=torch.full((given.rows,), samples),
        labels=torch.zeros(given.rows, 0, dtype=torch.int64),
        label_lengths=torch.zeros(given.rows, dtype=torch.int64),
        weight=torch.ones(given.rows),
        keys=torch.arange(given.rows),
        ids=tuple(map(str, range(given.rows))),
        texts=("",) * given.rows,
    )
    task.advance(0, seed=1)
    batch = task.prepare(batch, seed=2)
    index, mask = batch.extra["index"], batch.extra["mask"]
    rows, frames = mask.shape
    row = torch.arange(rows)[:, None]
    negatives = torch.zeros(rows, frames, task.negatives, dtype=torch.int64)
    negatives[row, index] = index[row[:, :, None], batch.extra["negatives"].long()] + frames * row[:, :, None]
    theirs = {"mask_time_indices": mask, "sampled_negative_indices": negatives}
    return task, model, batch, {"input_values": batch.audio, **theirs}


def steps(given: argparse.Namespace, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """Forward, backward and AdamW of each."""
    task, model, batch, theirs = make(given)
    apply_policy(task, CPU(bf16="software").policy(dtype))

    def stepper(module: torch.nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

        def run() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                value = loss()
            value.backward()
            optimizer.step()

        return run

    return {
        THEIRS: stepper(model, lambda: model(**theirs).loss),
        "speechtrain": stepper(task, lambda: task(batch).total),
    }


def objectives(given: argparse.Namespace, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """Quantiser, projections and contrastive loss of each, forward and backward, from the same features."""
    task, model, batch, theirs = make(given)
    mask, table = theirs["mask_time_indices"], theirs["sampled_negative_indices"]
    index, weight = batch.extra["index"], batch.extra["masked"]
    features = torch.randn(*mask.shape, task.encoder.extractor.channels)
    context = torch.randn(*mask.shape, task.encoder.width)

    def gathered(x: Tensor) -> Tensor:
        return x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))

    def ours() -> Tensor:
        found = task.quantizer(gathered(features), torch.tensor(2.0), weight)
        hidden, targets = task.final_proj(gathered(context)), task.project_q(found.codes)
        loss = contrastive_loss(hidden, targets, found.ids, batch.extra["negatives"], weight, 0.1)
        return loss.loss + 0.1 * found.diversity() * loss.frames

    def other() -> Tensor:
        # their forward's second half computes all frames and leaves the unmasked out of the sum
        codes, perplexity = model.quantizer(features, mask_time_indices=mask)
        hidden, targets = model.project_hid(context), model.project_q(codes)
        wrong = targets.flatten(0, 1)[table.flatten()].view(*table.shape, -1).permute(2, 0, 1, 3)
        scores = model.compute_contrastive_logits(targets[None], wrong, hidden, 0.1)
        places = ((1 - mask.long()) * -100).transpose(0, 1).flatten()
        loss = F.cross_entropy(scores.transpose(0, 2).reshape(-1, len(scores)), places, reduction="sum")
        unused = (model.config.num_codevectors_per_group * model.config.num_codevector_groups) - perplexity
        return loss + 0.1 * unused / model.config.num_codevectors_per_group * mask.sum()

    def runner(module: torch.nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            module.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                value = loss()
            value.backward()

        return run

    return {THEIRS: runner(model, other), "speechtrain": runner(task, ours)}


def in_turn(contenders: dict[str, Callable[[], None]], rounds: int, what: str, dtype: torch.dtype) -> None:
    """Print a line for each contender: medians, and the median, lowest and highest ratio to theirs."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(rounds + 1):  # the first round builds oneDNN's kernels and is not counted
        for name, run in contenders.items():
            wall, processor = time.perf_counter(), time.process_time()
            run()
            if number:
                times[name].append((time.perf_counter() - wall, time.process_time() - processor))
    precision = str(dtype).removeprefix("torch.")
    for name, measured in times.items():
        wall, processor = (statistics.median(column) for column in zip(*measured, strict=True))
        shares = [a[1] / b[1] for a, b in zip(measured, times[THEIRS], strict=True)]
        ratio = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
        print(f"| {what} | {precision} | {name} | {wall:.2f} | {processor:.2f} | {ratio} |", flush=True)


def profile(given: argparse.Namespace) -> None:
    """Operators of one of our steps by their own processor time."""
    run = steps(given, torch.float32)["speechtrain"]
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        run()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", help="step, objective, extractor; all, if none is named")
    parser.add_argument("--profile", action="store_true", help="operators of one of our steps, nothing else")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="of audio in a row")
    parser.add_argument("--channels", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--norms", nargs="+", default=["group", "layer"], choices=["group", "layer"])
    parser.add_argument("--fp32-matmul", default="highest", choices=["highest", "high", "medium"])
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"{unknown.pop()!r} is none of {', '.join(PARTS)}")
    if given.smoke:
        given.rows, given.seconds, given.channels, given.rounds = 1, 1.0, 32, 2
    torch.set_num_threads(given.threads)
    torch.set_float32_matmul_precision(given.fp32_matmul)
    precisions = [torch.float32]
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        precisions.append(torch.bfloat16)
    torch.manual_seed(0)
    audio = torch.randn(given.rows, int(given.seconds * 16000)) * 0.1
    print(f"{date.today()}, {given.rows} x {given.seconds} s, {given.channels} channels, {given.threads} "
          f"thread(s), fp32 matmul precision {given.fp32_matmul}, torch {torch.__version__}, "
          f"load average {os.getloadavg()[0]:.1f}")  # fmt: skip
    if torch.bfloat16 not in precisions:
        print("no bf16: this processor has no instructions for it")
    if given.profile:
        profile(given)
        return
    parts = given.parts or PARTS
    if "step" in parts or "objective" in parts:
        print("| part | precision | | wall, s | processor, s | of theirs |\n|---|---|---|---|---|---|")
        for what, contenders in (("step", steps), ("objective", objectives)):
            for dtype in precisions if what in parts else ():
                in_turn(contenders(given, dtype), given.rounds, what, dtype)
    if "extractor" in parts:
        print("| norm | precision | form | forward, s | backward, s | of conv1d |\n|---|---|---|---|---|---|")
        for norm in given.norms:
            for dtype in precisions:
                compare(norm, dtype, audio, given.channels, given.rounds)


if __name__ == "__main__":
    main()
