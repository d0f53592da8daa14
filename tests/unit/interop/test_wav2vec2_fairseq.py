"""Files of every layout, written here, against reference.md 4.6."""

from __future__ import annotations

import argparse
import enum
import os
import pickle
import re
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from speechtrain.encoders.wav2vec2 import Wav2Vec2Encoder
from speechtrain.errors import ConfigError, DataError
from speechtrain.interop import wav2vec2_fairseq, wav2vec2_hf
from speechtrain.interop.pickles import read_pickle
from speechtrain.interop.pretrained import MOST_LAYERS, Pretrained, describe, export_tensors
from speechtrain.models.wav2vec2 import Wav2Vec2
from speechtrain.nn.masking import SpanMask

from .conftest import make

LARGE: dict[str, Any] = {
    "conv_bias": True,
    "conv_norm": "layer",
    "width": 1024,
    "layers": 24,
    "feed_forward": 4096,
    "heads": 16,
    "pre_norm": True,
}
TOP = {
    *("args", "cfg", "model", "criterion", "optimizer_history", "task_state", "extra_state"),
    "last_optimizer_state",
}


def published(width: int, feed_forward: int, layers: int, codes: int, large: bool) -> dict[str, Any]:
    """Keys and shapes of the published models, written out from the reference."""
    keys: dict[str, tuple[int, ...]] = {"mask_emb": (width,)}
    for i, kernel in enumerate((10, 3, 3, 3, 3, 2, 2)):
        keys[f"feature_extractor.conv_layers.{i}.0.weight"] = (512, 1 if i == 0 else 512, kernel)
        if large:
            keys[f"feature_extractor.conv_layers.{i}.0.bias"] = (512,)
        if large or i == 0:
            norm = f"feature_extractor.conv_layers.{i}.2" + (".1" if large else "")
            keys |= {f"{norm}.weight": (512,), f"{norm}.bias": (512,)}
    keys |= {"post_extract_proj.weight": (width, 512), "post_extract_proj.bias": (width,)}
    keys |= {"quantizer.vars": (1, 640, codes // 2), "quantizer.weight_proj.weight": (640, 512)}
    keys |= {"quantizer.weight_proj.bias": (640,)}
    keys |= {"project_q.weight": (codes, codes), "project_q.bias": (codes,)}
    keys |= {"final_proj.weight": (codes, width), "final_proj.bias": (codes,)}
    keys |= {"encoder.pos_conv.0.bias": (width,), "encoder.pos_conv.0.weight_g": (1, 1, 128)}
    keys |= {"encoder.pos_conv.0.weight_v": (width, width // 16, 128)}
    keys |= {"encoder.layer_norm.weight": (width,), "encoder.layer_norm.bias": (width,)}
    keys |= {"layer_norm.weight": (512,), "layer_norm.bias": (512,)}
    for i in range(layers):
        at = f"encoder.layers.{i}"
        for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
            keys[f"{at}.self_attn.{part}.weight"] = (width, width)
            keys[f"{at}.self_attn.{part}.bias"] = (width,)
        for part in ("self_attn_layer_norm", "final_layer_norm"):
            keys |= {f"{at}.{part}.weight": (width,), f"{at}.{part}.bias": (width,)}
        keys |= {f"{at}.fc1.weight": (feed_forward, width), f"{at}.fc1.bias": (feed_forward,)}
        keys |= {f"{at}.fc2.weight": (width, feed_forward), f"{at}.fc2.bias": (width,)}
    return keys


@pytest.mark.parametrize("large", [False, True], ids=["base", "large"])
def test_keys_shapes_and_types_of_the_published_models(large: bool) -> None:
    with torch.device("meta"):
        encoder = Wav2Vec2Encoder(**(LARGE if large else {}), mask=SpanMask())
        task = Wav2Vec2(encoder, 768 if large else 256, code_width=768 if large else 256)
    model = Pretrained(
        describe(make_zero := task, {}).encoder, describe(make_zero, {}).model, dict(task.state_dict())
    )
    content = wav2vec2_fairseq.checkpoint_of(model)
    expected = published(1024, 4096, 24, 768, True) if large else published(768, 3072, 12, 256, False)
    assert {name: tuple(value.shape) for name, value in content["model"].items()} == expected
    assert {value.dtype for value in content["model"].values()} == {torch.float32}
    count = sum(value.numel() for value in content["model"].values())
    assert count == (317_390_592 if large else 95_044_608)
    assert large or len(expected) == 218


def test_top_level_structure(small: Pretrained, tmp_path: Path) -> None:
    wav2vec2_fairseq.write(small, wav2vec2_fairseq.checkpoint_of(small, 1200), tmp_path / "c.pt")
    content = torch.load(tmp_path / "c.pt", weights_only=True)  # plain values and tensors only
    assert set(content) == TOP
    assert content["args"] is None
    assert isinstance(content["model"], OrderedDict)
    assert content["optimizer_history"] == [
        {
            "criterion_name": "Wav2vecCriterion",
            "optimizer_name": "FairseqAdam",
            "lr_scheduler_state": {"best": None},
            "num_updates": 1200,
        }
    ]
    assert set(content["extra_state"]) == {
        *("metrics", "previous_training_time", "train_iterator", "val_loss", "best")
    }
    assert set(content["extra_state"]["train_iterator"]) == {
        *("version", "epoch", "iterations_in_epoch", "shuffle")
    }
    OmegaConf.create(content["cfg"])  # what upstream does with it first
    assert content["cfg"]["model"]["_name"] == "wav2vec2"
    assert content["cfg"]["task"]["_name"] == "audio_pretraining"


def test_round_trip_is_bit_equal(pretrained: Pretrained, tmp_path: Path) -> None:
    wav2vec2_fairseq.write(pretrained, wav2vec2_fairseq.checkpoint_of(pretrained), tmp_path / "c.pt")
    again = wav2vec2_fairseq.read(tmp_path / "c.pt")
    assert again.encoder == pretrained.encoder
    assert again.model == pretrained.model
    assert sorted(again.weights) == sorted(pretrained.weights)
    assert all(torch.equal(value, pretrained.weights[name]) for name, value in again.weights.items())
    assert not [path for path in tmp_path.iterdir() if path.name != "c.pt"]


FINE_TUNING_SETS = (
    *("dropout", "activation_dropout", "dropout_input", "attention_dropout", "encoder_layerdrop"),
    *("feature_grad_mult", "checkpoint_activations", "require_same_masks", "mask_dropout", "mask_prob"),
    *("mask_length", "mask_selection", "mask_other", "no_mask_overlap", "mask_min_space"),
    *("mask_channel_prob", "mask_channel_length", "mask_channel_selection", "mask_channel_other"),
    *("no_mask_channel_overlap", "mask_channel_min_space", "mask_channel_before"),
)
"""Settings that fairseq's fine-tuning replaces in the checkpoint, where the name is there."""


@pytest.mark.parametrize("mask", [SpanMask(), SpanMask(kind="normal", other=2.0, overlap=False), None])
def test_every_setting_that_fine_tuning_replaces_is_in_the_file(mask: SpanMask | None) -> None:
    for masks in ({"mask": mask or SpanMask(probability=0.0)}, {"channel_mask": mask}):
        task = make(**masks)
        settings = wav2vec2_fairseq.checkpoint_of(describe(task, task.state_dict()))["cfg"]["model"]
        assert not [name for name in FINE_TUNING_SETS if name not in settings]


_CONV = r"wav2vec2.feature_extractor.conv_layers.\1"
_LAYER = r"wav2vec2.encoder.layers.\1"
# fairseq's names in Hugging Face's model, not through our names
BOTH_NAMES = [
    (r"mask_emb", r"wav2vec2.masked_spec_embed"),
    (r"feature_extractor\.conv_layers\.(\d+)\.0\.(\w+)", rf"{_CONV}.conv.\2"),
    (r"feature_extractor\.conv_layers\.(\d+)\.2\.(?:1\.)?(\w+)", rf"{_CONV}.layer_norm.\2"),
    (r"layer_norm\.(\w+)", r"wav2vec2.feature_projection.layer_norm.\1"),
    (r"post_extract_proj\.(\w+)", r"wav2vec2.feature_projection.projection.\1"),
    (r"encoder\.pos_conv\.0\.(\w+)", r"wav2vec2.encoder.pos_conv_embed.conv.\1"),
    (r"encoder\.layer_norm\.(\w+)", r"wav2vec2.encoder.layer_norm.\1"),
    (r"encoder\.layers\.(\d+)\.self_attn\.(\w+)\.(\w+)", rf"{_LAYER}.attention.\2.\3"),
    (r"encoder\.layers\.(\d+)\.self_attn_layer_norm\.(\w+)", rf"{_LAYER}.layer_norm.\2"),
    (r"encoder\.layers\.(\d+)\.fc1\.(\w+)", rf"{_LAYER}.feed_forward.intermediate_dense.\2"),
    (r"encoder\.layers\.(\d+)\.fc2\.(\w+)", rf"{_LAYER}.feed_forward.output_dense.\2"),
    (r"encoder\.layers\.(\d+)\.final_layer_norm\.(\w+)", rf"{_LAYER}.final_layer_norm.\2"),
    (r"quantizer\.vars", r"quantizer.codevectors"),
    (r"quantizer\.weight_proj\.(\w+)", r"quantizer.weight_proj.\1"),
    (r"project_q\.(\w+)", r"project_q.\1"),
    (r"final_proj\.(\w+)", r"project_hid.\1"),
]


def theirs_of(name: str) -> str:
    for pattern, replacement in BOTH_NAMES:
        if match := re.fullmatch(pattern, name):
            return match.expand(replacement)
    raise KeyError(name)


def test_names_of_both_formats_agree_directly_and_through_ours(pretrained: Pretrained) -> None:
    through_ours = export_tensors(pretrained.weights, wav2vec2_hf.huggingface_name)
    directly = {theirs_of(name): value for name, value in wav2vec2_fairseq.state_of(pretrained).items()}
    assert directly.keys() == through_ours.keys()
    assert all(torch.equal(value, through_ours[name]) for name, value in directly.items())
    pytest.importorskip("transformers")
    assert wav2vec2_hf.difference_of(pretrained) < 2e-5


# --- layouts --------------------------------------------------------------------------------------


class _Foreign:
    """Classes as fairseq's, there while a file is written and gone when it is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = types.ModuleType("fairseq.dataclass.constants")
        choices = enum.Enum("Choices", {"default": "default", "layer_norm": "layer_norm"})
        choices.__module__ = module.__name__
        meter = type("AverageMeter", (), {"__module__": module.__name__})
        module.Choices, module.AverageMeter = choices, meter  # type: ignore[attr-defined]
        for name in ("fairseq", "fairseq.dataclass", module.__name__):
            monkeypatch.setitem(sys.modules, name, module)
        self.choices, self.meter = choices, meter
        self._monkeypatch = monkeypatch

    def forget(self) -> None:
        for name in ("fairseq", "fairseq.dataclass", "fairseq.dataclass.constants"):
            self._monkeypatch.delitem(sys.modules, name)


def plain_config(content: dict[str, Any], foreign: _Foreign) -> None:
    meter = foreign.meter()
    meter.sum = torch.tensor(3.0)
    content["extra_state"]["metrics"] = {"train": OrderedDict(loss=[1, "loss", meter])}


def omegaconf_config(content: dict[str, Any], foreign: _Foreign) -> None:
    content["cfg"] = OmegaConf.create(content["cfg"])
    content["cfg"]._metadata.resolver_cache["env"]["HOME"] = "a defaultdict with items"
    OmegaConf.set_struct(content["cfg"], True)


def enum_config(content: dict[str, Any], foreign: _Foreign) -> None:
    settings = content["cfg"]["model"]
    settings["extractor_mode"] = foreign.choices[settings["extractor_mode"]]
    settings["conv_feature_layers"] = "[(32, 10, 5)] + [(32, 3, 2)] * 4 + [(32,2,2)] + [(32,2,2)]"
    content["cfg"]["model"] = argparse.Namespace(**settings)


def namespace(content: dict[str, Any], foreign: _Foreign) -> None:
    cfg = content.pop("cfg")
    flat = {k: v for k, v in (cfg["model"] | cfg["task"]).items() if k != "_name"}
    flat |= {"task": "audio_pretraining", "arch": "wav2vec2", "criterion": "wav2vec"}
    flat |= {"latent_temp": str(tuple(flat["latent_temp"]))}
    flat["loss_weights"] = str(cfg["criterion"]["loss_weights"])
    content["args"] = argparse.Namespace(**flat)


def very_old(content: dict[str, Any], foreign: _Foreign) -> None:
    namespace(content, foreign)
    for key in ("criterion", "optimizer_history", "task_state", "extra_state", "last_optimizer_state"):
        del content[key]
    content |= {"optimizer": {"state": {}}, "best_loss": 1.0, "epoch": 3, "batch_offset": 0, "val_loss": 1.1}
    state = content["model"]
    for i in range(2):
        for kind in ("weight", "bias"):
            parts = [state.pop(f"encoder.layers.{i}.self_attn.{p}_proj.{kind}") for p in "qkv"]
            state[f"encoder.layers.{i}.self_attn.in_proj_{kind}"] = torch.cat(parts)


def half(content: dict[str, Any], foreign: _Foreign) -> None:
    content["model"] = OrderedDict((k, v.half()) for k, v in content["model"].items())
    flat = torch.zeros(sum(v.numel() for v in content["model"].values()))
    content["last_optimizer_state"] = {
        "state": {0: {"step": 5, "exp_avg": flat, "exp_avg_sq": flat}},
        "param_groups": [{"lr": 1e-4, "params": [0]}],
        "loss_scale": 128.0,
    }


def parametrised(content: dict[str, Any], foreign: _Foreign) -> None:
    state = content["model"]
    for pair, name in (("original0", "weight_g"), ("original1", "weight_v")):
        state[f"encoder.pos_conv.0.parametrizations.weight.{pair}"] = state.pop(f"encoder.pos_conv.0.{name}")


def gaudi(content: dict[str, Any], foreign: _Foreign) -> None:
    state = content["model"]
    for name in [n for n in state if n.endswith(".0.weight") and n.startswith("feature_extractor")]:
        state[name] = state[name].unsqueeze(2)


def tuned(content: dict[str, Any], foreign: _Foreign) -> None:
    own = {n: v for n, v in content["model"].items() if not n.startswith(("quantizer", "project_q", "final"))}
    content["model"] = OrderedDict((f"w2v_encoder.w2v_model.{n}", v) for n, v in own.items())
    content["model"]["w2v_encoder.proj.weight"] = torch.zeros(32, 48)
    content["cfg"]["model"] = {"_name": "wav2vec_ctc", "w2v_args": dict(content["cfg"])}


def old_tuned(content: dict[str, Any], foreign: _Foreign) -> None:
    tuned(content, foreign)
    inner = content["cfg"]["model"]["w2v_args"]
    content["cfg"] = None
    arguments = argparse.Namespace(**(inner["model"] | inner["task"]))
    content["args"] = argparse.Namespace(w2v_args=arguments, normalize=False)


LAYOUTS = (plain_config, omegaconf_config, enum_config, namespace, very_old, half, parametrised, gaudi, tuned)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("layout", [*LAYOUTS, old_tuned])
def test_every_layout_is_read(
    layout: Any, is_zip: bool, pretrained: Pretrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = wav2vec2_fairseq.checkpoint_of(pretrained)
    foreign = _Foreign(monkeypatch)
    layout(content, foreign)
    torch.save(content, tmp_path / "c.pt", _use_new_zipfile_serialization=is_zip)
    foreign.forget()
    read = wav2vec2_fairseq.read(tmp_path / "c.pt")
    expected = pretrained.encoder_only() if layout in (tuned, old_tuned) else pretrained
    assert read.encoder == expected.encoder
    assert read.model == expected.model
    assert set(read.weights) == set(expected.weights)
    for name, value in read.weights.items():
        assert value.dtype == torch.float32
        wanted = expected.weights[name]
        assert torch.equal(value, wanted.half().float() if layout is half else wanted), name


# --- what is refused ------------------------------------------------------------------------------


class Malicious:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    "call", [os.system, eval, exec, torch.hub.load, pickle.loads], ids=lambda c: c.__name__
)
def test_a_malicious_pickle_is_refused_and_not_run(
    call: Any, is_zip: bool, small: Pretrained, tmp_path: Path
) -> None:
    target = tmp_path / "ran"
    argument = f"touch {target}" if call is os.system else f"open({str(target)!r}, 'w')"
    content = wav2vec2_fairseq.checkpoint_of(small) | {"task_state": Malicious(call, argument)}
    torch.save(content, tmp_path / "c.pt", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(DataError, match=r"c\.pt is refused: it names .*none of its code was run") as caught:
        wav2vec2_fairseq.read(tmp_path / "c.pt")
    assert "\n" not in str(caught.value)
    assert not target.exists()


def test_a_foreign_callable_is_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    module = types.ModuleType("somebodys_code")

    def act(text: str) -> str:
        ran.append(text)
        return text

    act.__module__, act.__qualname__ = "somebodys_code", "act"
    module.act = act  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somebodys_code", module)
    torch.save({"model": Malicious(act, "x")}, tmp_path / "c.pt")
    found = read_pickle(tmp_path / "c.pt")["model"]
    assert not ran
    assert (found.name, found.arguments) == ("somebodys_code.act", ("x",))


def with_settings(**settings: Any) -> Any:
    return lambda content: content["cfg"]["model"].update(settings)


def drop_first(content: dict[str, Any]) -> None:
    del content["cfg"]["model"]["conv_feature_layers"]
    content["model"]["feature_extractor.conv_layers.0.0.weight"] = torch.zeros(32, 1, 9)


NAME = "encoder.layers.1.fc1.weight"
NOT_COMPUTED = {
    "cross_sample_negatives": 10,
    "codebook_negatives": 5,
    "negatives_from_everywhere": True,
    "mask_channel_before": True,
    "mask_dropout": 0.1,
    "require_same_masks": False,
    "crop_seq_to_multiple": 4,
}
CHANGES = [
    (lambda content: content["model"].pop(NAME), f"{NAME} is missing"),
    (
        lambda content: content["model"].update({"target_glu.0.weight": torch.zeros(2, 2)}),
        "target_glu.0.weight is not part of",
    ),
    (
        lambda content: content["model"].update({NAME: torch.zeros(96, 47)}),
        f"{NAME} is (96, 47)",
    ),
    (lambda content: content.update(cfg=None), "neither cfg nor args"),
    (with_settings(activation_fn="relu"), "activation_fn"),
    (with_settings(conv_feature_layers="f()"), "conv_feature_layers"),
    (with_settings(encoder_attention_heads=5), "heads"),
    (drop_first, "strides"),
    (lambda content: content.update(model={"a": torch.zeros(1)}), "wav2vec 2.0"),
    (lambda content: content.update(model={"mask_emb": "x"}), "has no wav2vec 2.0 model"),
    (lambda content: content["cfg"]["criterion"].update(infonce=False), "infonce is False"),
    *((with_settings(**{name: value}), f"{name} is {value!r}") for name, value in NOT_COMPUTED.items()),
]


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=[words for _, words in CHANGES])
def test_what_does_not_fit_is_named_in_one_line(
    change: Any, words: str, small: Pretrained, tmp_path: Path
) -> None:
    path = tmp_path / "c.pt"
    content = wav2vec2_fairseq.checkpoint_of(small)
    change(content)
    torch.save(content, path)
    with pytest.raises(DataError) as caught:
        wav2vec2_fairseq.read(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_read_ignores_the_objective_before_a_fine_tuning(
    small: Pretrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = wav2vec2_fairseq.checkpoint_of(small)
    content["cfg"]["model"]["codebook_negatives"] = 5
    tuned(content, _Foreign(monkeypatch))
    torch.save(content, tmp_path / "c.pt")
    assert wav2vec2_fairseq.read(tmp_path / "c.pt").is_encoder


def test_published_strides_where_the_settings_lack_them(small: Pretrained, tmp_path: Path) -> None:
    content = wav2vec2_fairseq.checkpoint_of(small)
    del content["cfg"]["model"]["conv_feature_layers"]
    torch.save(content, tmp_path / "c.pt")
    assert wav2vec2_fairseq.read(tmp_path / "c.pt").encoder["conv_layers"] == small.encoder["conv_layers"]


@pytest.mark.parametrize("keep", [0, 3, 100, 5000])
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_a_cut_file_is_one_line(keep: int, is_zip: bool, small: Pretrained, tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    torch.save(wav2vec2_fairseq.checkpoint_of(small), path, _use_new_zipfile_serialization=is_zip)
    path.write_bytes(path.read_bytes()[: keep or -300])
    with pytest.raises(DataError, match=r"c\.pt"):
        wav2vec2_fairseq.read(path)


def expanded(path: Path, content: dict[str, Any]) -> None:
    content["model"]["mask_emb"] = torch.zeros(1).expand(10**12)  # 4 TB once copied
    torch.save(content, path)


def other_protocol(path: Path, content: dict[str, Any]) -> None:
    torch.save(content, path, pickle_protocol=4)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (expanded, "larger than its storage"),
        (other_protocol, "protocol is 4"),
    ],
)
def test_contents_that_torch_load_would_take_on_trust(
    change: Any, told: str, small: Pretrained, tmp_path: Path
) -> None:
    change(tmp_path / "c.pt", wav2vec2_fairseq.checkpoint_of(small))
    with pytest.raises(DataError, match=rf"c\.pt .*{told}") as caught:
        wav2vec2_fairseq.read(tmp_path / "c.pt")
    assert "\n" not in str(caught.value)


def test_an_encoder_alone_is_not_exported(small: Pretrained) -> None:
    with pytest.raises(ConfigError, match="this is an encoder"):
        wav2vec2_fairseq.checkpoint_of(small.encoder_only())


LAYER = "encoder.layers.0.self_attn.in_proj_weight"


def test_layers_are_counted_before_they_are_built() -> None:
    for encoder in (
        {"layers": MOST_LAYERS + 1, "conv_layers": []},
        {"layers": 1, "conv_layers": [[1]] * 2_000},
    ):
        with pytest.raises(ConfigError, match="the most are"):
            Pretrained(encoder, {}, {}).shapes()


def test_an_attention_of_one_row_is_named(tmp_path: Path) -> None:
    settings = {"conv_feature_layers": "[(8,10,5)]", "conv_pos_groups": 1, "encoder_attention_heads": 1}
    model = {name: torch.zeros(8) for name in ("mask_emb", "layer_norm.weight", "layer_norm.bias")}
    torch.save({"model": {**model, LAYER: torch.zeros(1, 8)}, "cfg": {"model": settings}}, tmp_path / "a.pt")
    with pytest.raises(DataError, match=r"a\.pt: the tensor "):
        wav2vec2_fairseq.read(tmp_path / "a.pt")
