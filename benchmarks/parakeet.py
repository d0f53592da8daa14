"""A training step of a small Parakeet: transformers' own class against ours, on the same batch.

    make peers && .venv-peers/bin/python benchmarks/parakeet.py --kind rnnt tdt --rounds 5

4 layers of 256, joint 640, 1,024 pieces, 8 rows of 10 s with 60 labels, dropout 0, fp32, denormals flushed.
Each implementation has a process of its own; their steps alternate, and the table has the medians. "Joint and
loss" begins at the projected frames and labels, backward included; the whole step adds encoder, prediction
network and AdamW. Memory is the peak beyond what the process held before its first step.
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
from torch import Tensor

ROWS, FRAMES, LABELS, PIECES = 8, 1000, 60, 1024
ENCODER = {
    "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1024, "num_attention_heads": 4,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0,
}  # fmt: skip
WHO = ("theirs", "ours", "saving")
Step = Callable[[], None]


def theirs(kind: str, folder: Path) -> tuple[Step, Step]:
    import transformers

    model = getattr(transformers, f"ParakeetFor{kind.upper()}").from_pretrained(folder).train()
    features, labels = batch()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    mask = torch.ones(features.shape[:2], dtype=torch.bool)
    given = {"labels": labels, "decoder_input_ids": torch.nn.functional.pad(labels, (1, 0), value=PIECES)}

    def whole() -> None:
        optimizer.zero_grad()
        model(input_features=features, attention_mask=mask, **given).loss.backward()
        optimizer.step()

    with torch.no_grad():
        encoded = model.get_audio_features(features, attention_mask=mask)
    sides = encoded.pooler_output.detach(), model.decoder(given["decoder_input_ids"]).detach()

    def joint() -> None:
        frames, predicted = (side.clone().requires_grad_() for side in sides)
        encoded.pooler_output = frames
        model.decoder.forward = lambda *_, **__: predicted
        try:
            model(encoder_outputs=encoded, **given).loss.backward()
        finally:
            del model.decoder.forward

    return whole, joint


def ours(kind: str, folder: Path, is_saving: bool) -> tuple[Step, Step]:
    from omegaconf import OmegaConf

    from speechtrain.batch import Batch
    from speechtrain.config.build import build_encoder, build_model
    from speechtrain.interop.weights import initialise, read_nodes, read_weights
    from speechtrain.losses import transducer
    from speechtrain.runs.compose import compose
    from speechtrain.text.vocabulary import Characters
    from speechtrain.training.recompute import checkpoint_layers

    config = compose(["model=rnnt", "data=digits"])
    for group, node in read_nodes(folder).items():
        config[group] = OmegaConf.create(node)
    config.model.joint.dropout = config.model.prediction.dropout = 0.0
    symbols = Characters("".join(chr(0x4E00 + number) for number in range(PIECES)))
    model: Any = build_model(config, symbols, build_encoder(config)).train()
    initialise(model, read_weights(str(folder)), str(folder))
    if is_saving:
        checkpoint_layers(model)
    features, labels = batch()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    one, lengths = torch.ones(ROWS), torch.full((ROWS,), FRAMES)
    counts = torch.full((ROWS,), LABELS)
    names = ("a",) * ROWS
    given = Batch(features, lengths, labels, counts, one, one.long(), names, names)

    def whole() -> None:
        optimizer.zero_grad()
        frames, after = model.encoder.contextualise(features, lengths)
        (model.losses(frames, after, given)[0] / counts).mean().backward()
        optimizer.step()

    with torch.no_grad():
        frames, after = model.encoder.contextualise(features, lengths)
        sides = model.joint.encoder(frames), model.joint.prediction(model.prediction(labels))

    def joint() -> None:
        weight, bias = model.joint.output.weight, model.joint.output.bias
        both = [side.clone().requires_grad_() for side in sides]
        timed = {"durations": model.joint.durations} if kind == "tdt" else {}
        losses = transducer.transducer_loss(*both, weight, bias, labels, after, counts, blank=PIECES, **timed)
        (losses / counts).mean().backward()

    return whole, joint


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, FRAMES, 80, generator=generator)
    return features, torch.randint(0, PIECES, (ROWS, LABELS), generator=generator)


def serve(which: str, kind: str, folder: Path) -> None:
    """Build one implementation, then run a step for every line of stdin and print its seconds."""
    torch.set_flush_denormal(True)
    whole, joint = theirs(kind, folder) if which == "theirs" else ours(kind, folder, which == "saving")
    steps = {"whole": whole, "joint": joint}
    Path("/proc/self/clear_refs").write_text("5")  # what building the model needed is no part of a step
    before = peak()
    print("ready", flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        steps[line.strip()]()
        print(json.dumps([time.perf_counter() - begun, peak() - before]), flush=True)


def peak() -> float:
    """The most memory that this process had since it was reset, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def published(kind: str, folder: Path) -> None:
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
    parser.add_argument("--serve", nargs=2, metavar=("WHICH", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve[0], given.kind[0], Path(given.serve[1]))
        return
    print("| loss | part | transformers | ours | ratio | ours, checkpoint_layers | ratio |\n|" + "---|" * 7)
    for kind in given.kind:
        with tempfile.TemporaryDirectory() as folder:
            published(kind, Path(folder))
            measure(kind, folder, given.rounds)


def measure(kind: str, folder: str, rounds: int) -> None:
    running = {
        which: subprocess.Popen(
            [sys.executable, __file__, "--kind", kind, "--serve", which, folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for which in WHO
    }  # fmt: skip
    for process in running.values():
        while "ready" not in (line := process.stdout.readline()):  # type: ignore[union-attr]
            if not line:
                raise SystemExit(f"{kind}: a process ended before its first step")
    for part in ("joint", "whole"):
        taken: dict[str, list[float]] = {which: [] for which in running}
        peaks = dict.fromkeys(running, 0.0)
        for number in range(rounds + 1):
            for which, process in running.items():
                print(part, file=process.stdin, flush=True)
                seconds, peaks[which] = json.loads(process.stdout.readline())  # type: ignore[union-attr]
                if number:  # the first one is a warm-up
                    taken[which].append(seconds)
        medians = {which: statistics.median(seconds) for which, seconds in taken.items()}
        name = {"joint": "joint and loss", "whole": "whole step"}[part]
        row(kind, f"{name}, s", medians)
        row(kind, f"peak memory until here, MiB ({name})", peaks)
    for process in running.values():
        process.stdin.close()  # type: ignore[union-attr]
        process.wait()


def row(kind: str, part: str, found: dict[str, float]) -> None:
    cells = [f"{found['theirs']:.3g}"]
    for which in WHO[1:]:
        cells += [f"{found[which]:.3g}", f"{found[which] / found['theirs']:.2f}"]
    print(f"| {kind} | {part} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
