"""Time of wav2vec 2.0: a step and its loss compared with Hugging Face's model, and the extractor's kernels.

    python benchmarks/wav2vec2.py                  # all three parts, base, in fp32 and, if possible, bf16
    python benchmarks/wav2vec2.py step --rounds 3  # forward, backward and AdamW only (needs transformers)
    python benchmarks/wav2vec2.py --smoke          # thin, seconds
    python benchmarks/wav2vec2.py extractor --rows 4 --seconds 10 --threads 2 --fp32-matmul medium

The candidates take turns (measuring.py). The baseline of a ratio is Hugging Face's model, or conv1d for the
extractor. Both models get the same audio, mask and negatives, and the published
dropouts. Layer drop is off, because Hugging Face skips a dropped layer and speechtrain computes it.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from cpu_step import noise
from measuring import Times, in_turn, machine, time_cells
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
HUGGING_FACE = "Hugging Face"
SPEECHTRAIN = "speechtrain"
TORCH_DROPOUT = "speechtrain with torch's dropout"
SMOKE = {"width": 48, "layers": 2, "feed_forward": 96, "heads": 4}


def layers(channels: int) -> list[list[int]]:
    """Return [channels, kernel, stride] of each convolution of the published extractor."""
    return [[channels, 10, 5], *[[channels, 3, 2]] * 4, *[[channels, 2, 2]] * 2]


def time_extractor(extractor: ConvExtractor, audio: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Return the processor seconds of a forward and of a backward."""
    extractor.zero_grad(set_to_none=True)
    start = time.process_time()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        features = extractor(audio)
    forward_end = time.process_time()
    features.backward(torch.ones_like(features))
    return forward_end - start, time.process_time() - forward_end


def precision_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def build_extractor(form: str, norm: str, dtype: torch.dtype, channels: int) -> ConvExtractor:
    """Return an extractor that computes its convolutions by the kernels ``form`` of the compute policy."""
    torch.manual_seed(0)
    extractor = ConvExtractor(layers(channels), norm == "layer", norm)
    autocast = dtype if dtype != torch.float32 else None
    apply_policy(extractor, ComputePolicy(conv=form, autocast_dtype=autocast))
    return extractor


def compare_extractors(norm: str, dtype: torch.dtype, audio: Tensor, channels: int, rounds: int) -> None:
    """Print a line for each form of the extractor: median times, and the ratio of their sum to conv1d."""
    extractors = {form: build_extractor(form, norm, dtype, channels) for form in CONVOLUTIONS}
    for extractor in extractors.values():
        time_extractor(extractor, audio, dtype)  # The first call builds the kernels of oneDNN.
    times: dict[str, list[tuple[float, float]]] = {form: [] for form in extractors}
    for _ in range(rounds):
        for form, extractor in extractors.items():
            times[form].append(time_extractor(extractor, audio, dtype))
    precision = precision_name(dtype)
    for form, form_times in times.items():
        forward = statistics.median([forward_seconds for forward_seconds, _ in form_times])
        backward = statistics.median([backward_seconds for _, backward_seconds in form_times])
        ratios = []
        for seconds, base_seconds in zip(form_times, times[BASELINE], strict=True):
            ratios.append(sum(seconds) / sum(base_seconds))
        ratio = statistics.median(ratios)
        print(f"| {norm} | {precision} | {form} | {forward:.3f} | {backward:.3f} | {ratio:.2f} |", flush=True)


# --- The whole step, and its objective, against Hugging Face --------------------------------------


@dataclass
class Setup:
    """Both models of the same form, a prepared batch of speechtrain, and the same inputs for Hugging Face."""

    task: Wav2Vec2
    model: Any  # of transformers
    batch: Batch
    inputs: dict[str, Tensor]


Objective = Callable[[Setup, Tensor, Tensor], Tensor]


def inputs_of_hugging_face(batch: Batch, negative_count: int) -> dict[str, Tensor]:
    """Return the audio, mask and negatives of a batch as ``Wav2Vec2ForPreTraining.forward`` expects them."""
    index = batch.extra["index"]  # (rows, M), the frame of each masked frame
    mask = batch.extra["mask"]  # (rows, frames)
    rows, frames = mask.shape
    row = torch.arange(rows)[:, None]
    # speechtrain numbers negatives among the masked frames of their row, Hugging Face among all frames of all
    # rows.
    frame_of_negative = index[row[:, :, None], batch.extra["negatives"].long()]
    negatives = torch.zeros(rows, frames, negative_count, dtype=torch.int64)
    negatives[row, index] = frame_of_negative + frames * row[:, :, None]
    return {"input_values": batch.audio, "mask_time_indices": mask, "sampled_negative_indices": negatives}


def set_up(options: argparse.Namespace) -> Setup:
    """Return both models with random weights, and the same inputs for both."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = SMOKE if options.smoke else {}
    encoder = Wav2Vec2Encoder(layers(options.channels), layer_drop=0.0, mask=SpanMask(), **sizes)
    task = Wav2Vec2(encoder).train()
    config = wav2vec2_hf.config_of(describe(task, {}))
    model = transformers.Wav2Vec2ForPreTraining(transformers.Wav2Vec2Config(**config)).train()
    batch = noise(options.rows, options.seconds, labels=0, classes=2)
    task.advance(0, seed=1)
    batch = task.prepare(batch, seed=2)
    return Setup(task, model, batch, inputs_of_hugging_face(batch, task.negatives))


def steps(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, Callable[[int], None]]:
    """Return a function for each model that computes forward, backward and AdamW.

    The third model is speechtrain with the dropout and the attention of torch.
    """
    setup = set_up(options)
    task, model = setup.task, setup.model
    other_task = copy.deepcopy(task)
    policy = CPU(bf16="software").policy(dtype)
    apply_policy(task, policy)
    apply_policy(other_task, replace(policy, dropout="torch"))

    def stepper(module: torch.nn.Module, loss: Callable[[], Tensor]) -> Callable[[int], None]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

        def run(_round: int) -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                total = loss()
            total.backward()
            optimizer.step()

        return run

    return {
        HUGGING_FACE: stepper(model, lambda: model(**setup.inputs).loss),
        SPEECHTRAIN: stepper(task, lambda: task(setup.batch).total),
        TORCH_DROPOUT: stepper(other_task, lambda: other_task(setup.batch).total),
    }


def speechtrain_objective(setup: Setup, features: Tensor, context: Tensor) -> Tensor:
    """Return the loss of speechtrain: quantiser, projections and contrastive loss of the masked frames."""
    task, extra = setup.task, setup.batch.extra
    index = extra["index"]

    def gathered(frames: Tensor) -> Tensor:
        return frames.gather(1, index[:, :, None].expand(-1, -1, frames.shape[2]))

    quantized = task.quantizer(gathered(features), torch.tensor(2.0), extra["masked"])
    hidden, targets = task.final_proj(gathered(context)), task.project_q(quantized.codes)
    loss = contrastive_loss(hidden, targets, quantized.ids, extra["negatives"], extra["masked"], 0.1)
    return loss.loss + 0.1 * quantized.diversity() * loss.frames


def hugging_face_objective(setup: Setup, features: Tensor, context: Tensor) -> Tensor:
    """Return the loss of the second half of Hugging Face's ``forward``.

    It computes all frames and leaves those without a mask out of the sum.
    """
    model, config = setup.model, setup.model.config
    mask, table = setup.inputs["mask_time_indices"], setup.inputs["sampled_negative_indices"]
    codes, perplexity = model.quantizer(features, mask_time_indices=mask)
    hidden, targets = model.project_hid(context), model.project_q(codes)
    negatives = targets.flatten(0, 1)[table.flatten()].view(*table.shape, -1).permute(2, 0, 1, 3)
    scores = model.compute_contrastive_logits(targets[None], negatives, hidden, 0.1)
    labels = ((1 - mask.long()) * -100).transpose(0, 1).flatten()
    loss = F.cross_entropy(scores.transpose(0, 2).reshape(-1, len(scores)), labels, reduction="sum")
    unused = config.num_codevectors_per_group * config.num_codevector_groups - perplexity
    return loss + 0.1 * unused / config.num_codevectors_per_group * mask.sum()


def objectives(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, Callable[[int], None]]:
    """Return a function for each model that computes its loss and its backward from the same features."""
    setup = set_up(options)
    mask = setup.inputs["mask_time_indices"]
    features = torch.randn(*mask.shape, setup.task.encoder.extractor.channels)
    context = torch.randn(*mask.shape, setup.task.encoder.width)

    def runner(module: torch.nn.Module, objective: Objective) -> Callable[[int], None]:
        def run(_round: int) -> None:
            module.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = objective(setup, features, context)
            loss.backward()

        return run

    return {
        HUGGING_FACE: runner(setup.model, hugging_face_objective),
        SPEECHTRAIN: runner(setup.task, speechtrain_objective),
    }


def print_times(times: dict[str, Times], part: str, dtype: torch.dtype) -> None:
    """Print a line for each model: median times, and the median, lowest and highest ratio."""
    precision = precision_name(dtype)
    for name, measured in times.items():
        print(f"| {part} | {precision} | {name} | {time_cells(measured, times[HUGGING_FACE])} |", flush=True)


def profile(options: argparse.Namespace, dtype: torch.dtype) -> None:
    """Print the operators of a step of speechtrain, sorted by processor time."""
    print(precision_name(dtype))
    run = steps(options, dtype)[SPEECHTRAIN]
    run(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run(0)
    print(
        profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50)
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", help="step, objective or extractor (default: all)")
    parser.add_argument("--profile", action="store_true", help="only print the operators of a step")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="of audio in a row")
    parser.add_argument("--channels", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--norms", nargs="+", default=["group", "layer"], choices=["group", "layer"])
    parser.add_argument("--fp32-matmul", default="highest", choices=["highest", "high", "medium"])
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"{part!r} is none of {', '.join(PARTS)}")
    if options.smoke:
        options.rows, options.seconds, options.channels, options.rounds = 1, 1.0, 32, 2
    return options


def print_parts(options: argparse.Namespace, precisions: list[torch.dtype], audio: Tensor) -> None:
    """Print a table for step and objective, and a table for the extractor."""
    parts = options.parts or PARTS
    builders = {"step": steps, "objective": objectives}
    model_parts = [part for part in builders if part in parts]
    if model_parts:
        print("| part | precision | | wall, s | processor, s | of theirs |\n|---|---|---|---|---|---|")
    for part in model_parts:
        for dtype in precisions:
            print_times(in_turn(builders[part](options, dtype), options.rounds), part, dtype)
    if "extractor" in parts:
        print("| norm | precision | form | forward, s | backward, s | of conv1d |\n|---|---|---|---|---|---|")
        for norm in options.norms:
            for dtype in precisions:
                compare_extractors(norm, dtype, audio, options.channels, options.rounds)


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision(options.fp32_matmul)
    precisions = [torch.float32]
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        precisions.append(torch.bfloat16)
    torch.manual_seed(0)
    audio = torch.randn(options.rows, int(options.seconds * 16000)) * 0.1
    print(machine())
    print(f"{options.rows} x {options.seconds} s, {options.channels} channels, ", end="")
    print(f"{options.threads} threads, fp32 matmul precision {options.fp32_matmul}")
    if torch.bfloat16 not in precisions:
        print("no bf16: this processor has no instructions for it")
    if options.profile:
        for dtype in precisions:
            profile(options, dtype)
    else:
        print_parts(options, precisions, audio)


if __name__ == "__main__":
    main()
