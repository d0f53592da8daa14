"""Transformers' own Parakeet and Trainer on the recordings and time that `recipe=scratch` gets.

    speechtrain prepare split MANIFEST --out DIR/split
    make peers && .venv-peers/bin/python benchmarks/parakeet_speech.py --split DIR/split --out DIR

These settings are the same as in `recipe=scratch`: the held-out recordings, the sizes of the encoder (5
layers of 128, frames of 30 ms), batches of 16 recordings, the learning rate and the cosine. The others are
the defaults of `ParakeetForRNNT`, `ParakeetFeatureExtractor` and `Trainer`. Trainer plans in updates, so the
program first times some updates. Their time counts, and training stops when the time is over. The greedy
search decodes one recording at a time.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

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

from speechtrain.metrics import error_rates

ENCODER = {
    "hidden_size": 128, "num_hidden_layers": 5, "intermediate_size": 256, "num_attention_heads": 4,
    "subsampling_factor": 2, "subsampling_conv_channels": 32, "num_mel_bins": 40, "layerdrop": 0.0,
}  # fmt: skip
ROWS, RATE, WARMUP = 16, 1.5e-3, 0.08
TIMED = 60  # updates


class Recordings(torch.utils.data.Dataset[dict[str, Any]]):
    """The recordings of a manifest, with the ids of their characters and their lengths in seconds."""

    def __init__(self, manifest: Path, characters: str = "") -> None:
        self.paths, self.texts, self.seconds = [], [], []
        for line in manifest.read_text().splitlines():
            cut = json.loads(line)
            source, supervision = cut["recording"]["sources"][0], cut["supervisions"][0]
            self.paths.append(source["source"])
            self.texts.append(supervision["text"])
            self.seconds.append(cut["duration"])
        if not characters:
            characters = "".join(sorted(set("".join(self.texts))))
        self.characters = characters

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
        features = self.extractor(
            audio, sampling_rate=16_000, return_tensors="pt", return_attention_mask=True
        )
        labels = [torch.tensor(row["labels"]) for row in rows]
        padded = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=self.blank)
        inputs = torch.nn.functional.pad(padded, (1, 0), value=self.blank)
        return {**features, "labels": padded, "decoder_input_ids": inputs}


class Grouped(Trainer):
    """A Trainer that groups recordings of similar length, as it does for a data set with a length column."""

    def _get_train_sampler(self, train_dataset: Any = None) -> LengthGroupedSampler:
        return LengthGroupedSampler(ROWS, lengths=self.train_dataset.seconds)


class Clock(TrainerCallback):
    """Stops the training at the time ``end`` of the performance counter."""

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
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=ROWS, learning_rate=RATE,
        lr_scheduler_type="cosine", warmup_steps=int(WARMUP * steps),
        dataloader_num_workers=1, remove_unused_columns=False, save_strategy="no", report_to=[], use_cpu=True,
        logging_steps=100, seed=1, disable_tqdm=True,
    )  # fmt: skip
    extractor = ParakeetFeatureExtractor(feature_size=40, hop_length=240)
    model = ParakeetForRNNT(config)
    model.generation_config.decoder_start_token_id = blank
    return Grouped(model, arguments, Collator(extractor, blank), train, callbacks=[Clock(end)])


@torch.inference_mode()
def transcribe(model: ParakeetForRNNT, recordings: Recordings, index: int, collate: Collator) -> str:
    """Return the greedy transcript of a recording."""
    batch = collate([recordings[index]])
    ids = model.generate(
        input_features=batch["input_features"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=2000,
    )
    row = getattr(ids, "sequences", ids)[0].tolist()
    return "".join(recordings.characters[label] for label in row if label < collate.blank)


def errors(model: ParakeetForRNNT, recordings: Recordings, collate: Collator) -> tuple[float, float]:
    """Return the CER and the WER over all recordings."""
    model.eval()
    pairs = []
    for index, text in enumerate(recordings.texts):
        pairs.append((text, transcribe(model, recordings, index, collate)))
    print(*pairs[:5], sep="\n", flush=True)
    rates = error_rates(pairs)
    cer, wer = (float(errors / units) for errors, units in (rates["cer"], rates["wer"]))
    return cer, wer


def seconds_per_update(train: Recordings, out: Path, end: float) -> float:
    """Return the seconds of an update, from two short trainings. Their difference leaves out the start."""
    seconds = []
    for steps in (TIMED // 4, TIMED):
        start = time.perf_counter()
        trainer(train, out, steps, end).train()
        seconds.append(time.perf_counter() - start)
    return (seconds[1] - seconds[0]) / (TIMED - TIMED // 4)


def main() -> None:
    options = parse_arguments()
    torch.set_flush_denormal(True)
    start = time.perf_counter()
    end = start + 3600 * options.hours
    train = Recordings(options.split / "train.jsonl")
    valid = Recordings(options.split / "valid.jsonl", train.characters)
    update_seconds = seconds_per_update(train, options.out, end)
    planned = max(1, int((end - time.perf_counter()) / update_seconds))
    print(f"{update_seconds:.3f} s an update, {planned} planned", flush=True)
    run = trainer(train, options.out, planned, end)
    run.train()
    seconds = time.perf_counter() - start
    cer, wer = errors(run.model, valid, run.data_collator)
    print("| updates | passes | seconds | CER held out | WER |\n|" + "---|" * 5)
    updates = run.state.global_step
    epochs = updates * ROWS / len(train)
    print(
        f"| {updates} of {planned} | {epochs:.1f} | {seconds:.0f} | {100 * cer:.1f} % | {100 * wer:.1f} % |"
    )
    print_losses(run.state.log_history)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", type=Path, required=True, help="folder of train.jsonl and valid.jsonl")
    parser.add_argument("--hours", type=float, default=0.5)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def print_losses(log_history: list[dict[str, Any]]) -> None:
    """Print each third logged loss."""
    losses = [f"{event['step']}: {event['loss']:.2f}" for event in log_history if "loss" in event]
    print("loss: " + ", ".join(losses[::3]))


if __name__ == "__main__":
    main()
