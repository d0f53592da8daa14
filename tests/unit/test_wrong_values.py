"""A part refuses a wrong value in one line. A row has the part, the value, and words of the line."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from speechtrain.batch import Footprint
from speechtrain.data.corpora.digits import Digits
from speechtrain.data.module import SpeechData
from speechtrain.data.sampler import BatchLimits, BatchSize
from speechtrain.decoding.beam import TransducerBeam
from speechtrain.decoding.greedy import Greedy
from speechtrain.encoders.convolutional import ConvolutionalEncoder
from speechtrain.encoders.fastconformer import FastConformer
from speechtrain.encoders.wav2vec2 import Wav2Vec2Encoder
from speechtrain.errors import ConfigError, SpeechtrainError
from speechtrain.features.augment import Augment
from speechtrain.features.logmel import LogMel
from speechtrain.features.specaugment import SpecAugment
from speechtrain.nn.conv_extractor import ConvExtractor
from speechtrain.nn.joint import Joint
from speechtrain.nn.masking import SpanMask
from speechtrain.nn.prediction import LSTMPrediction, StatelessPrediction
from speechtrain.nn.quantizer import GumbelQuantizer
from speechtrain.nn.stack_time import StackTime
from speechtrain.nn.transformer import Transformer
from speechtrain.optim.ema import EMA
from speechtrain.optim.lamb import LAMB
from speechtrain.optim.muon import Muon
from speechtrain.optim.novograd import NovoGrad
from speechtrain.optim.schedules import (
    Constant,
    Cosine,
    IntelQuadratic,
    Polynomial,
    TriStage,
    WarmupHoldExponential,
)
from speechtrain.precision import FP16
from speechtrain.start.build import dry_build
from speechtrain.start.compose import compose
from speechtrain.start.run_config import run_config
from speechtrain.text.vocabulary import Characters
from speechtrain.tracking.console import Console
from speechtrain.tracking.wandb import WandB

Part = Callable[..., Any]
WEIGHTS = [nn.Parameter(torch.ones(4, 4))]
THIN = [[8, 10, 5], [8, 3, 2]]


def with_features(encoder: Part, **values: Any) -> Part:
    return partial(encoder, LogMel(), Augment(), **values)


transformer = partial(Transformer, 16, 3, 24, 4, position_kernel=6, position_groups=2)
fast_conformer = with_features(FastConformer)
convolutional = with_features(ConvolutionalEncoder, blocks=[{}], filters=8)
data = partial(SpeechData, "a.jsonl", {}, Characters())
no_footprint = BatchSize(BatchLimits(memory_gib=1.0), Footprint(0.0))
ROWS: list[tuple[Part, dict[str, Any], str]] = [
    (data, {"min_seconds": 5.0, "max_seconds": 1.0}, "min_seconds=5.0"),
    (data, {"workers": -2}, "workers=-2"),
    (data, {"workers": 100_000}, "workers=100000"),
    (data, {"speed": [1.1, 0.9]}, "the lowest and the highest"),
    (data, {"speed": [0.1, 1.0]}, "the lowest and the highest"),
    (data, {"speed": [1.0]}, "the lowest and the highest"),
    (data, {"sample_rate": 0}, "sample_rate=0"),
    (data, {"channel": -1}, "channel=-1"),
    (data, {"timeout_seconds": 0.0}, "timeout_seconds=0"),
    (data, {"shapes": -1}, "shapes=-1"),
    (data, {"hold_out": 1.0}, "hold_out=1"),
    (data, {"crop_seconds": 3.0}, "Use tokenizer=none"),
    (data, {"crop_seconds": 0.0}, "crop_seconds=0.0"),
    (data, {"decoded_gib": -1.0}, "decoded_gib=-1.0"),
    (data, {"decoded_gib": "all"}, "decoded_gib=all"),
    (data, {"decoded_gib": math.inf}, "decoded_gib=inf"),
    (BatchLimits, {"count": 0}, "count=0"),
    (BatchLimits, {"seconds": -1.0}, "seconds=-1.0"),
    (BatchLimits, {"count": None}, "all null"),
    (BatchLimits, {"window": 0}, "window=0"),
    (BatchLimits, {"multiple": 0}, "multiple=0"),
    (no_footprint.rows, {"seconds": 1.0}, "does not predict its memory"),
    (Digits, {"split": "dev"}, "choose one of train, valid"),
    (Digits, {"split": "train", "min_words": 8}, "min_words=8, max_words=7"),
    (Digits, {"split": "train", "gap_seconds": [0.2, 0.1]}, "gap_seconds"),
    (Digits, {"split": "train", "gap_seconds": [0.2]}, "gap_seconds"),
    (Digits, {"split": "train", "utterances": 0}, "utterances=0"),
    (StackTime, {"factor": 0}, "StackTime.factor is 0"),
    (LSTMPrediction, {"embedding": 0}, "embedding is 0"),
    (LSTMPrediction, {"dropout": 1.0}, "dropout is 1.0"),
    (StatelessPrediction, {"context": 0}, "context is 0"),
    (Joint, {"hidden": 0}, "hidden is 0"),
    (Joint, {"bias": "none"}, "bias is 'none'"),
    (Joint, {"dropout": -0.1}, "dropout is -0.1"),
    (partial(Transformer, 16, 3, 24), {"heads": 3}, "heads is 3"),
    (partial(Transformer, 16, 3, 24, 4), {"position_groups": 3}, "position_groups is 3"),
    (partial(Transformer, 16, feed_forward=24, heads=4), {"layers": 0}, "layers is 0"),
    (transformer, {"length_multiple": 0}, "length_multiple is 0"),
    (ConvExtractor, {"conv_layers": []}, "conv_layers is"),
    (ConvExtractor, {"conv_layers": [[4, 3]]}, "conv_layers is"),
    (ConvExtractor, {"conv_layers": [[4, 0, 1]]}, "conv_layers is"),
    (partial(ConvExtractor, THIN), {"conv_norm": "batch"}, "conv_norm is"),
    (partial(ConvExtractor, THIN), {"gradient_scale": -1.0}, "gradient_scale is"),
    (GumbelQuantizer, {"code_width": 255}, "GumbelQuantizer.code_width is 255"),
    (GumbelQuantizer, {"groups": 0}, "groups (0)"),
    (GumbelQuantizer, {"entries": 1}, "GumbelQuantizer.entries is 1"),
    (GumbelQuantizer, {"init_std": 0.0}, "init_std"),
    (SpanMask, {"probability": 1.5}, "probability is 1.5"),
    (SpanMask, {"length": 0}, "length is 0"),
    (SpanMask, {"probability": 1.0, "length": 1}, "probability is 1"),
    (SpanMask, {"kind": "gamma"}, "kind is 'gamma'"),
    (SpanMask, {"other": -1.0}, "other is -1.0"),
    (SpanMask, {"kind": "uniform", "other": 21.0}, "other is 21.0"),
    (SpanMask, {"min_space": -1}, "min_space"),
    (SpanMask, {"min_masks": -1}, "min_masks"),
    (Wav2Vec2Encoder, {"dropout": 1.0}, "dropout is"),
    (Wav2Vec2Encoder, {"attention_dropout": 1.0}, "attention_dropout is"),
    (Wav2Vec2Encoder, {"input_dropout": 1.0}, "input_dropout is"),
    (Wav2Vec2Encoder, {"layer_drop": 1.0}, "layer_drop is"),
    (fast_conformer, {"width": 30}, "width is 30"),
    (fast_conformer, {"kernel": 4}, "kernel is 4"),
    (fast_conformer, {"subsampling": 6}, "subsampling is 6"),
    (fast_conformer, {"subsampling": 512}, "subsampling is 512"),
    (fast_conformer, {"layers": 0}, "layers is 0"),
    (fast_conformer, {"residual_dropout": 1.0}, "residual_dropout is 1.0"),
    (fast_conformer, {"context": [1]}, "context is"),
    (convolutional, {"blocks": []}, "blocks is empty"),
    (convolutional, {"filters": None}, "filters is None: it must be 1 to"),
    (convolutional, {"blocks": [{}, {"filters": None}]}, "blocks[1].filters is None: it must be 1 to"),
    (convolutional, {"blocks": [{"kernel": 4}]}, "blocks[0].kernel is 4: it must be odd"),
    (convolutional, {"kernel": 2}, "kernel is 2: it must be odd"),
    (convolutional, {"blocks": [{"stride": 0}]}, "blocks[0].stride is 0: it must be 1 to 100"),
    (convolutional, {"blocks": [{"dilation": 10**9}]}, "blocks[0].dilation is 1000000000"),
    (convolutional, {"blocks": [{"repeat": True}]}, "blocks[0].repeat is True"),
    (convolutional, {"blocks": [{"times": 1.5}]}, "blocks[0].times is 1.5"),
    (convolutional, {"blocks": [{"residual": "yes"}]}, "residual is 'yes': it must be true or false"),
    (convolutional, {"blocks": [{"dropout": 1.0}]}, "dropout is 1.0: it must be at least 0 and below 1"),
    (convolutional, {"blocks": [{"dropout": math.nan}]}, "blocks[0].dropout is nan"),
    (convolutional, {"blocks": [{"kernels": 5}]}, "a block takes no 'kernels', but only filters"),
    (convolutional, {"blocks": [{"times": 100}] * 3}, "blocks have 1500 convolutions, but at most 1000"),
    (convolutional, {"activation": "gelu"}, "activation is 'gelu'. Choose swish or relu"),
    (convolutional, {"squeeze": -1}, "squeeze is -1"),
    (convolutional, {"init": "xavier"}, "init is 'xavier'. Choose tds_uniform or xavier_uniform"),
    (Augment, {"speed": [1.1, 0.9]}, "speed"),
    (Augment, {"speed": [0.0, 1.0]}, "speed"),
    (Augment, {"speed": [1.0]}, "speed"),
    (Augment, {"noise_db": [40.0, 5.0]}, "noise_db"),
    (Augment, {"noise_probability": 1.5}, "noise_probability"),
    (Augment, {"noise_tilt": -0.1}, "noise_tilt"),
    (Augment, {"recorded_noise_db": [20.0, 10.0]}, "recorded_noise_db"),
    (Augment, {"recorded_noise_db": [10.0]}, "recorded_noise_db"),
    (Augment, {"recorded_probability": -0.1}, "recorded_probability"),
    (Augment, {"warp": 0.5}, "warp"),
    (Augment, {"freq_masks": -1}, "freq_masks"),
    (SpecAugment, {"rect_masks": -1}, "rect_masks is -1"),
    (SpecAugment, {"rect_freq": -1}, "rect_freq is -1"),
    (SpecAugment, {"freq_masks": -1}, "freq_masks is -1"),
    (SpecAugment, {"time_width": -0.1}, "time_width is -0.1"),
    (SpecAugment, {"time_masks": 2.5}, "time_masks is 2.5"),
    (SpecAugment, {"time_width": 1.5}, "time_width is 1.5"),
    (SpecAugment, {"freq_width_min": 21}, "freq_width_min"),
    (SpecAugment, {"time_width": 5, "time_width_min": 6}, "time_width_min"),
    (LogMel, {"form": "htk"}, "form is 'htk'"),
    (LogMel, {"form": "kaldi", "hop_seconds": 0.021}, "window_seconds is below hop_seconds"),
    (LogMel, {"padding": "same"}, "padding is 'same'"),
    (LogMel, {"n_fft": 256}, "n_fft is 256, and window_seconds covers 320"),
    (LogMel, {"n_fft": 513}, "n_fft is 513. It must be even"),
    (LogMel, {"hop_seconds": 1e-6}, "hop_seconds"),
    (LogMel, {"f_max": 9000.0}, "f_min and f_max"),
    (LogMel, {"f_min": 8000.0}, "f_min and f_max"),
    (LogMel, {"log_floor": 0.0}, "log_floor is 0.0"),
    (LogMel, {"splice": 0}, "splice is 0"),
    (LogMel, {"mels": 0}, "mels is 0"),
    *(
        (partial(optimizer, WEIGHTS), values, next(iter(values)))
        for optimizer in (LAMB, NovoGrad)
        for values in (
            {"lr": -1.0},
            {"lr": math.nan},
            {"eps": -1e-9},
            {"weight_decay": -0.1},
            {"betas": (0.9, 1.0)},
            {"betas": [0.9]},
        )
    ),
    (partial(Muon, WEIGHTS), {"momentum": -0.1}, "momentum"),
    (partial(Muon, WEIGHTS), {"momentum": 1.0}, "momentum"),
    *((partial(EMA, nn.Linear(1, 1)), {"decay": decay}, "decay is") for decay in (0.0, 1.0, math.nan)),
    (Constant, {"peak": -1.0}, "peak"),
    (partial(Constant, 0.1), {"warmup_steps": -1}, "warmup_steps"),
    (partial(Cosine, 0.1, steps=5), {"end": -1.0}, "end"),
    (partial(Polynomial, 0.1, steps=5), {"power": -1.0}, "power"),
    (partial(Polynomial, 0.1), {"warmup_steps": 5}, "steps is null. Set it"),
    (partial(Polynomial, 0.1), {"steps": 0}, "steps is 0"),
    (partial(TriStage, 0.1, steps=5), {"phases": [0.5, 0.6]}, "phases"),
    (partial(TriStage, 0.1, steps=5), {"last": 0.0}, "last"),
    (partial(IntelQuadratic, 0.1, steps=5), {"min_lr": math.nan}, "min_lr"),
    (partial(WarmupHoldExponential, 0.1, steps_per_epoch=5), {"gamma": 1.5}, "gamma"),
    (partial(WarmupHoldExponential, 0.1), {"steps_per_epoch": 0}, "steps_per_epoch"),
    (TransducerBeam, {"width": 0}, "width is 0"),
    (TransducerBeam, {"nbest": 0}, "nbest is 0"),
    (TransducerBeam, {"max_symbols_per_step": 0}, "max_symbols_per_step is 0"),
    (TransducerBeam, {"max_symbols_per_step": 10**9}, "max_symbols_per_step is 1000000000"),
    (TransducerBeam, {"gamma": 0}, "gamma is 0"),
    (Greedy, {"max_symbols_per_step": 0}, "max_symbols_per_step is 0"),
    (FP16, {"floor": 0.0}, "floor"),
    (FP16, {"initial_scale": 1.0, "floor": 2.0}, "floor"),
    (FP16, {"growth_interval": 0}, "floor"),
    (Console, {"mode": "lively"}, "mode is 'lively', but it must be"),
    (partial(WandB, "run"), {"module": "os"}, "module is 'os', but it must be wandb or trackio"),
    (Console, {"form": "csv"}, "form is 'csv', but it must be speechtrain, full or dll"),
]


@pytest.mark.parametrize(("part", "values", "words"), ROWS)
def test_a_wrong_value_is_named_in_one_line(part: Part, values: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, ValueError)) as error:
        part(**values)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


TDT = "model.joint.durations=[0,1]"
OVERRIDES = [
    ("data.batch.window=0", "data.batch.window=0: it must be at least 1 (plain shuffling)"),
    ("data.shapes=-1", "data.shapes=-1: it must be at least 0 (no fixed shapes)"),
    ("data.sample_rate=8000", "data.sample_rate=8000: the encoder expects 16000"),
    ("data.batch.memory_gib=most", "data.batch.memory_gib=most: it must be above 0, or null for no limit"),
    ("tokenizer.alphabet=aa", "tokenizer.alphabet repeats 'a'. List each character once"),
    ("tokenizer=sentencepiece tokenizer.model=/no", "tokenizer.model: /no: No such file or directory"),
    ("tokenizer=none", "RNNT learns from transcripts. Replace tokenizer=none"),
    ("augment.warp=1", "augment.warp is 1. It must be 0 or more and below 0.5"),
    ("encoder=contextnet_tiny encoder.blocks=[{kernel: 4}]", "encoder.blocks[0].kernel is 4: it must be odd"),
    ("encoder=wav2vec2 encoder.mask.length=0", "encoder.mask.length is 0. It must be 1 frame or more"),
    ("decoder.max_symbols=0", "decoder.max_symbols is 0: it must be at least 1"),
    ("decoder.endpoint_seconds=0", "decoder.endpoint_seconds is 0: it must be at least 0.1"),
    ("decoder=beam decoder.endpoint_seconds=0", "decoder.endpoint_seconds is 0: it must be at least 0.1"),
    (
        "decoder.max_symbols_per_step=1001",
        "decoder.max_symbols_per_step is 1001, but it must be at most 1000",
    ),
    ("optimizer.form=apex", "optimizer.form is 'apex'. Choose one of torch, fairseq, intel"),
    ("optimizer=adamw8bit device=hpu", "optimizer=adamw8bit does not run on device=hpu"),
    ("model.joint_rows=-1", "model.joint_rows is -1: it must be at least 0"),
    ("model.fastemit=-0.1", "model.fastemit is -0.1: it must be at least 0"),
    ("model.delay_penalty=-0.1", "model.delay_penalty is -0.1: it must be at least 0"),
    ("model.joint.durations=[1,0]", "model.joint.durations is [1, 0]. It must be whole numbers of frames"),
    ("model.joint.durations=[0]", "model.joint.durations is [0]. It must be whole numbers of frames"),
    ("model.sigma=0.1", "model.sigma=0.1: it must be at least 0, and 0 without joint.durations"),
    (f"{TDT} model.sigma=-1", "model.sigma=-1: it must be at least 0"),
    (f"{TDT} model.fastemit=0.01", "model.fastemit=0.01: it must be 0 with joint.durations"),
    (f"{TDT} decoder=beam", "decoder: this model has no beam search. Set decoder=greedy"),
    (f"{TDT} decoder@final_decoder=beam", "final_decoder: this model has no beam search"),
    ("model=ctc tokenizer=none", "CTC learns from transcripts. Replace tokenizer=none"),
    ("model=ctc model.dropout=1.0", "model.dropout is 1.0: it must be at least 0 and below 1"),
    ("model=wav2vec2_small encoder=lstm_small", "model=wav2vec2 cannot pretrain LSTMEncoder"),
    ("model=wav2vec2_small encoder.mask=null", "encoder.mask is null"),
    ("model=wav2vec2_small model.temperature=[0.5,2,1]", "model.temperature is [0.5, 2, 1]. It must be"),
    ("model=wav2vec2_small model.negatives=0", "model.negatives must be at least 1"),
    ("model=wav2vec2_small model.target_dropout=1", "model.target_dropout is 1"),
]


@pytest.mark.parametrize(("overrides", "words"), OVERRIDES)
def test_dry_build_names_the_key_of_a_wrong_value(overrides: str, words: str) -> None:
    keys = overrides.replace(": ", ":").split()
    if "optimizer=adamw8bit" in keys:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is missing (extra 'memory')")
    with pytest.raises(SpeechtrainError) as error:
        dry_build(run_config(compose([*keys, "run_dir=x"])))
    assert str(error.value).startswith(words)
    assert "\n" not in str(error.value)
