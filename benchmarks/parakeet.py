"""A training step of a small Parakeet: the class of transformers against speechtrain's, on the same batch.

    make peers && .venv-peers/bin/python benchmarks/parakeet.py --kind rnnt tdt --rounds 5

4 layers of 256, joint 640, 1,024 pieces, 8 rows of 10 s with 60 labels, dropout 0, fp32, denormals flushed.
Each implementation has a separate process. Their steps alternate, and the table has the medians. "Joint and
loss" begins at the projected frames and labels and includes backward. The whole step adds encoder, prediction
network and AdamW. Memory is the peak beyond the memory of the process before its first step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import peak_bytes, reset_peak
from torch import Tensor

MiB = 2**20
ROWS, FRAMES, LABELS, PIECES = 8, 1000, 60, 1024
ENCODER = {
    "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1024, "num_attention_heads": 4,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0,
}  # fmt: skip
TRANSFORMERS, SPEECHTRAIN, CHECKPOINTING = "transformers", "speechtrain", "checkpointing"
IMPLEMENTATIONS = (TRANSFORMERS, SPEECHTRAIN, CHECKPOINTING)
Step = Callable[[], None]


def transformers_steps(kind: str, folder: Path) -> tuple[Step, Step]:
    """Return the whole step and the step of joint and loss of transformers' model in ``folder``."""
    import transformers

    model = getattr(transformers, f"ParakeetFor{kind.upper()}").from_pretrained(folder).train()
    features, labels = batch()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    mask = torch.ones(features.shape[:2], dtype=torch.bool)
    targets = {"labels": labels, "decoder_input_ids": F.pad(labels, (1, 0), value=PIECES)}

    def whole_step() -> None:
        optimizer.zero_grad()
        model(input_features=features, attention_mask=mask, **targets).loss.backward()
        optimizer.step()

    with torch.no_grad():
        encoded = model.get_audio_features(features, attention_mask=mask)
        predicted = model.decoder(targets["decoder_input_ids"])
    return whole_step, transformers_joint(model, encoded, predicted, targets)


def transformers_joint(model: Any, encoded: Any, predicted: Tensor, targets: dict[str, Tensor]) -> Step:
    """Return a step of joint and loss. It replaces the outputs of encoder and prediction network."""
    frames = encoded.pooler_output.detach()

    def joint_step() -> None:
        encoded.pooler_output = frames.clone().requires_grad_()
        states = predicted.clone().requires_grad_()
        model.decoder.forward = lambda *_, **__: states
        try:
            model(encoder_outputs=encoded, **targets).loss.backward()
        finally:
            del model.decoder.forward

    return joint_step


def speechtrain_model(folder: Path) -> Any:
    """Return speechtrain's model with the weights of transformers' model in ``folder``."""
    from omegaconf import OmegaConf

    from speechtrain.interop.weights import initialise, read_nodes, read_weights
    from speechtrain.start.build import build_encoder, build_model
    from speechtrain.start.compose import compose
    from speechtrain.start.run_config import run_config
    from speechtrain.text.vocabulary import Characters

    config = compose(["model=rnnt", "data=digits"])
    for group, node in read_nodes(folder).items():
        config[group] = OmegaConf.create(node)
    config.model.joint.dropout = config.model.prediction.dropout = 0.0
    characters = map(chr, range(0x4E00, 0x4E00 + PIECES))
    symbols = Characters("".join(characters))
    run = run_config(config)
    model: Any = build_model(run, symbols, build_encoder(run)).train()
    initialise(model, read_weights(str(folder)), str(folder))
    return model


def speechtrain_steps(model: Any, kind: str) -> tuple[Step, Step]:
    """Return the whole step and the step of joint and loss of speechtrain's model."""
    from speechtrain.batch import Batch

    features, labels = batch()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    weight, lengths = torch.ones(ROWS), torch.full((ROWS,), FRAMES)
    counts = torch.full((ROWS,), LABELS)
    names = ("a",) * ROWS
    inputs = Batch(features, lengths, labels, counts, weight, weight.long(), names, names)

    def whole_step() -> None:
        optimizer.zero_grad()
        frames, frame_counts = model.encoder.contextualise(features, lengths)
        losses, *_ = model.losses(frames, frame_counts, inputs)
        (losses / counts).mean().backward()
        optimizer.step()

    return whole_step, speechtrain_joint(model, kind, inputs)


def speechtrain_joint(model: Any, kind: str, inputs: Any) -> Step:
    """Return a step of joint and loss, from the projected frames and labels of a batch."""
    from speechtrain.losses import transducer

    with torch.no_grad():
        frames, frame_counts = model.encoder.contextualise(inputs.audio, inputs.audio_lengths)
        sides = model.joint.encoder(frames), model.joint.prediction(model.prediction(inputs.labels))
    counts = inputs.label_lengths
    durations = {"durations": model.joint.durations} if kind == "tdt" else {}

    def joint_step() -> None:
        weight, bias = model.joint.output.weight, model.joint.output.bias
        leaves = [side.clone().requires_grad_() for side in sides]
        losses = transducer.transducer_loss(
            *leaves, weight, bias, inputs.labels, frame_counts, counts, blank=PIECES, **durations
        )
        (losses / counts).mean().backward()

    return joint_step


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, FRAMES, 80, generator=generator)
    return features, torch.randint(0, PIECES, (ROWS, LABELS), generator=generator)


def serve(implementation: str, kind: str, folder: Path) -> None:
    """Build one implementation, then run a step for every line of stdin and print its seconds and peak."""
    torch.set_flush_denormal(True)
    if implementation == TRANSFORMERS:
        whole_step, joint_step = transformers_steps(kind, folder)
    else:
        from speechtrain.training.recompute import checkpoint_layers

        model = speechtrain_model(folder)
        if implementation == CHECKPOINTING:
            checkpoint_layers(model)
        whole_step, joint_step = speechtrain_steps(model, kind)
    steps = {"whole": whole_step, "joint": joint_step}
    reset_peak()  # The peak does not include the building of the model.
    before = peak_bytes()
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        steps[line.strip()]()
        seconds = time.perf_counter() - start
        print(json.dumps([seconds, (peak_bytes() - before) / MiB]), flush=True)


def write_model(kind: str, folder: Path) -> None:
    """Write a random model of transformers into ``folder``."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"Parakeet{kind.upper()}Config")(
        encoder_config=ENCODER, vocab_size=PIECES + 1, blank_token_id=PIECES, pad_token_id=PIECES,
        decoder_hidden_size=640, num_decoder_layers=1,
    )  # fmt: skip
    getattr(transformers, f"ParakeetFor{kind.upper()}")(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", nargs="+", default=["rnnt", "tdt"], choices=("rnnt", "tdt"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", nargs=2, metavar=("IMPLEMENTATION", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        implementation, folder = options.serve
        serve(implementation, options.kind[0], Path(folder))
        return
    print("| loss | part | transformers | ours | ratio | ours, checkpoint_layers | ratio |\n|" + "---|" * 7)
    for kind in options.kind:
        with tempfile.TemporaryDirectory() as folder:
            write_model(kind, Path(folder))
            measure(kind, folder, options.rounds)


def start(implementation: str, kind: str, folder: str) -> subprocess.Popen[str]:
    """Start a process that serves an implementation, and wait until it is ready."""
    command = [sys.executable, __file__, "--kind", kind, "--serve", implementation, folder]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:  # type: ignore[union-attr]
        if "ready" in line:
            return process
    raise SystemExit(f"{kind}: a process ended before its first step")


def measure(kind: str, folder: str, rounds: int) -> None:
    """Print the median times and the peaks of all implementations."""
    processes = {name: start(name, kind, folder) for name in IMPLEMENTATIONS}
    for part, title in (("joint", "joint and loss"), ("whole", "whole step")):
        times: dict[str, list[float]] = {name: [] for name in processes}
        peaks = dict.fromkeys(processes, 0.0)
        for number in range(rounds + 1):
            for name, process in processes.items():
                print(part, file=process.stdin, flush=True)
                seconds, peaks[name] = json.loads(process.stdout.readline())  # type: ignore[union-attr]
                if number:  # The first round is a warm-up.
                    times[name].append(seconds)
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        print_row(kind, f"{title}, s", medians)
        print_row(kind, f"peak memory until here, MiB ({title})", peaks)
    for process in processes.values():
        process.stdin.close()  # type: ignore[union-attr]
        process.wait()


def print_row(kind: str, part: str, figures: dict[str, float]) -> None:
    """Print the figure of transformers, and each other figure with its ratio to it."""
    baseline = figures[TRANSFORMERS]
    cells = [f"{baseline:.3g}"]
    for name in (SPEECHTRAIN, CHECKPOINTING):
        cells += [f"{figures[name]:.3g}", f"{figures[name] / baseline:.2f}"]
    print(f"| {kind} | {part} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
