"""Transformers' own Parakeet and Trainer on the recordings and time that `recipe=scratch` gets.

    speechtrain prepare split MANIFEST --out DIR/split
    make peers && .venv-peers/bin/python benchmarks/parakeet_speech.py --split DIR/split --out DIR

The split holds out what `recipe=scratch` holds out. The encoder has the recipe's sizes (5 layers of 128,
frames of 30 ms), the batches its 16 recordings; learning rate and cosine are the recipe's too. The rest is
what `ParakeetForRNNT`, `ParakeetFeatureExtractor` and `Trainer` do by themselves. Trainer plans in updates,
so some are timed first, on the clock, and the clock stops it. Greedy texts are decoded one by one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from transformers import (
    ParakeetFeatureExtractor,
    ParakeetForRNNT,
    ParakeetRNNTConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

ENCODER = {
    "hidden_size": 128, "num_hidden_layers": 5, "intermediate_size": 256, "num_attention_heads": 4,
    "subsampling_factor": 2, "subsampling_conv_channels": 32, "num_mel_bins": 40, "layerdrop": 0.0,
}  # fmt: skip
ROWS, RATE, WARMUP = 16, 1.5e-3, 0.08
TIMED = 60  # updates


class Recordings(torch.utils.data.Dataset[dict[str, Any]]):
    """The recordings of a manifest, with ids of characters; lengths in seconds, to group by."""

    def __init__(self, manifest: Path, characters: str = "") -> None:
        rows = [json.loads(line) for line in manifest.read_text().splitlines()]
        self.paths = [row["recording"]["sources"][0]["source"] for row in rows]
        self.texts = [row["supervisions"][0]["text"] for row in rows]
        self.seconds = [row["duration"] for row in rows]
        self.characters = characters or "".join(sorted(set("".join(self.texts))))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        audio, _ = soundfile.read(self.paths[index], dtype="float32")
        labels = [self.characters.index(c) for c in self.texts[index] if c in self.characters]
        return {"audio": audio, "labels": labels}


class Collator:
    def __init__(self, extractor: ParakeetFeatureExtractor, blank: int) -> None:
        self.extractor, self.blank = extractor, blank

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        audio = [row["audio"] for row in rows]
        found = self.extractor(audio, sampling_rate=16_000, return_tensors="pt", return_attention_mask=True)
        labels = [torch.tensor(row["labels"]) for row in rows]
        padded = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=self.blank)
        inputs = torch.nn.functional.pad(padded, (1, 0), value=self.blank)
        return {**found, "labels": padded, "decoder_input_ids": inputs}


class Grouped(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> LengthGroupedSampler:
        return LengthGroupedSampler(ROWS, lengths=self.train_dataset.seconds)  # as for a column of lengths


class Clock(TrainerCallback):
    def __init__(self, end: float) -> None:
        self.end = end

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = time.perf_counter() > self.end or control.should_training_stop


def trainer(train: Recordings, out: Path, steps: int, end: float) -> Trainer:
    torch.manual_seed(1)
    blank = len(train.characters)
    config = ParakeetRNNTConfig(
        encoder_config=ENCODER, vocab_size=blank + 1, blank_token_id=blank, pad_token_id=blank,
        decoder_hidden_size=256, num_decoder_layers=1,
    )  # fmt: skip
    given = TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=ROWS, learning_rate=RATE,
        lr_scheduler_type="cosine", warmup_steps=int(WARMUP * steps),
        dataloader_num_workers=1, remove_unused_columns=False, save_strategy="no", report_to=[], use_cpu=True,
        logging_steps=100, seed=1, disable_tqdm=True,
    )  # fmt: skip
    extractor = ParakeetFeatureExtractor(feature_size=40, hop_length=240)
    model = ParakeetForRNNT(config)
    model.generation_config.decoder_start_token_id = blank
    return Grouped(model, given, Collator(extractor, blank), train, callbacks=[Clock(end)])


def errors(model: ParakeetForRNNT, found: Recordings, collate: Collator) -> tuple[float, float]:
    """CER and WER over all recordings."""
    wrong, size = np.zeros(2), np.zeros(2)
    model.eval()
    for index, text in enumerate(found.texts):
        batch = collate([found[index]])
        with torch.inference_mode():
            ids = model.generate(
                input_features=batch["input_features"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=2000,
            )
        ids = getattr(ids, "sequences", ids)[0].tolist()
        heard = "".join(found.characters[i] for i in ids if i < collate.blank)
        if index < 5:
            print(repr(text), repr(heard), sep="\n", flush=True)
        for number, split in enumerate((list, str.split)):
            wrong[number] += distance(split(text), split(heard))
            size[number] += len(split(text))
    cer, wer = wrong / size
    return float(cer), float(wer)


def distance(one: list[str], other: list[str]) -> int:
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", type=Path, required=True, help="folder of train.jsonl and valid.jsonl")
    parser.add_argument("--hours", type=float, default=0.5)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_flush_denormal(True)
    begun = time.perf_counter()
    end = begun + 3600 * given.hours
    train = Recordings(given.split / "train.jsonl")
    valid = Recordings(given.split / "valid.jsonl", train.characters)
    steps = [TIMED // 4, TIMED]
    seconds = []
    for count in steps:  # the difference leaves out what a start costs
        first = time.perf_counter()
        trainer(train, given.out, count, end).train()
        seconds.append(time.perf_counter() - first)
    a_step = (seconds[1] - seconds[0]) / (steps[1] - steps[0])
    planned = max(1, int((end - time.perf_counter()) / a_step))
    print(f"{a_step:.3f} s an update, {planned} planned", flush=True)
    run = trainer(train, given.out, planned, end)
    run.train()
    trained = time.perf_counter() - begun
    cer, wer = errors(run.model, valid, run.data_collator)
    print("| updates | passes | seconds | CER held out | WER |\n|" + "---|" * 5)
    done = run.state.global_step
    passes = done * ROWS / len(train)
    print(f"| {done} of {planned} | {passes:.1f} | {trained:.0f} | {100 * cer:.1f} % | {100 * wer:.1f} % |")
    losses = [(e["step"], e["loss"]) for e in run.state.log_history if "loss" in e]
    print("loss: " + ", ".join(f"{s}: {v:.2f}" for s, v in itertools.islice(losses, 0, None, 3)))


if __name__ == "__main__":
    main()
