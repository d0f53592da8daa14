"""``speechtrain train recipe=demo`` by hand, without a config and a launcher: ``python examples/by_hand.py``.

The losses are those of the command to the bit. A second call continues at the newest checkpoint.
"""

from collections.abc import Callable
from contextlib import closing

import torch

from speechtrain.counter_rng import RunStream, seed_at
from speechtrain.data.acoustics import Acoustics
from speechtrain.data.corpora.digits import Digits
from speechtrain.data.module import SpeechData
from speechtrain.data.sampler import BatchLimits
from speechtrain.devices.cpu import CPU
from speechtrain.encoders.lstm import LSTMEncoder
from speechtrain.features.augment import Augment
from speechtrain.features.logmel import LogMel
from speechtrain.models.rnnt import RNNT
from speechtrain.nn.joint import Joint
from speechtrain.nn.prediction import LSTMPrediction
from speechtrain.optim.adamw import AdamW
from speechtrain.optim.schedules import Cosine
from speechtrain.precision import FP32
from speechtrain.task import Task
from speechtrain.text.vocabulary import Characters, Tokenizer
from speechtrain.tracking.console import Console
from speechtrain.tracking.group import Trackers
from speechtrain.tracking.jsonl import Jsonl
from speechtrain.trainer_config import TrainerConfig
from speechtrain.training.trainer import Trainer

SEED = 1


def small_rnnt(tokenizer: Tokenizer) -> RNNT:
    """Return an RNN-T of 1.7 million weights."""
    features = LogMel(window_seconds=0.025, mels=40, form="torch", log_floor=1e-8, normalise="loud")
    augment = Augment(noise_db=[5.0, 40.0], noise_probability=0.5, warp=0.2)
    encoder = LSTMEncoder(
        features, augment, hidden=256, pre_layers=1, post_layers=1, layer_norm=True, init_scale=1.0
    )
    prediction = LSTMPrediction(
        embedding=128, hidden=256, layers=1, dropout=0.1, layer_norm=True, init_scale=1.0
    )
    joint = Joint(hidden=256, dropout=0.1)
    return RNNT(tokenizer, encoder, prediction, joint, ctc_weight=0.3)


def train(build_task: Callable[[Tokenizer], Task], run_dir: str, steps: int = 375, valid: int = 300) -> None:
    """Train on spoken digits for ``steps`` updates. Validate on ``valid`` utterances of other voices."""
    device = CPU()
    device.open()
    precision = FP32()

    tokenizer = Characters(alphabet=" abcdefghijklmnopqrstuvwxyz'", normaliser="lower")
    data = SpeechData(
        train=Digits("train", utterances=2000),
        valid={"unheard": Digits("valid", utterances=valid)},
        tokenizer=tokenizer,
        seed=SEED,
        batch=BatchLimits(count=8),
        speed=[0.9, 1.1],
        acoustics=Acoustics(silence=0.4),
        longest_pause=0.6,
    )
    data.check()

    torch.manual_seed(seed_at(SEED, RunStream.INITIAL_WEIGHTS))
    task = build_task(tokenizer).to(device.name)
    optimizer = AdamW(task.parameter_groups(), lr=2e-3, betas=(0.9, 0.99), weight_decay=1e-3, fused=True)
    schedule = Cosine(peak=2e-3, steps=steps, warmup_steps=None)  # None: 8 % of the steps

    tracker = Trackers({"console": Console(), "jsonl": Jsonl(run_dir)})
    config = TrainerConfig(max_steps=steps, clip=1.0, ema=0.99)
    trainer = Trainer(config, device, run_dir, tracker, precision, seed=SEED)
    with closing(data), closing(tracker):
        trainer.fit(task, data, optimizer, schedule, checkpoint=trainer.checkpointer.newest())
    print(f"word error rate of unheard voices: {trainer.progress.metrics['unheard/wer']:.2%}")


if __name__ == "__main__":  # Processes that load batches import this file.
    train(small_rnnt, "runs/by_hand")
