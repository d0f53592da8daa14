"""speechtrain doctor: what it finds right and wrong, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speechtrain.commands import doctor
from speechtrain.optim import adamw8bit
from speechtrain.start.compose import compose
from speechtrain.start.run_config import part_of, run_config
from speechtrain.start.targets import ALLOW_TARGETS

pytestmark = pytest.mark.slow

TINY = (
    *("recipe=demo", "device.threads=1", "data.workers=0"),
    *("data.train.utterances=16", "data.train.min_words=1", "data.train.max_words=2"),
    *("data.valid.unheard.utterances=4", "data.valid.unheard.min_words=1", "data.valid.unheard.max_words=2"),
    *(
        "encoder.hidden=16",
        "model.prediction.hidden=16",
        "model.prediction.embedding=8",
        "model.joint.hidden=16",
    ),
)


@pytest.fixture(autouse=True)
def _own_folder(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("DATASET_DIR", raising=False)


def look(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit code, and state and finding by what was looked at."""
    code = doctor.run(list(argv))
    out = capsys.readouterr().out
    return code, {line[7:20].strip(): (line[:5].strip(), line[21:]) for line in out.splitlines()}


def test_the_choices_of_another_installation_are_amber(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import speechtrain.conf

    finding = doctor.installation_finding()
    assert finding.state == "green"
    assert finding.text.endswith("conf")
    monkeypatch.setattr(speechtrain.conf, "__path__", [str(tmp_path / "conf")])
    finding = doctor.installation_finding()
    assert finding.state == "amber"
    assert f"choices in {tmp_path}/conf, remove" in finding.text


def test_a_sound_recipe_is_green_and_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = look(capsys, *TINY)
    assert code == 0
    for what in (
        "python",
        "torch",
        "audio",
        "recipe",
        "model",
        "links",
        "one step",
        "epoch",
    ):
        assert found[what][0] == "green", found
    assert "largest batch, 8 rows" in found["one step"][1]
    assert re.match(r"[\d.e-]+ hours for each epoch of \d+ micro-batches", found["epoch"][1])
    assert not [
        path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")
    ]  # torch's own


def test_a_missing_corpus_is_red_with_the_fix(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = look(capsys, "recipe=fsdd", "device.threads=1")
    assert code == 3
    assert [what for what, (state, _) in found.items() if state == "red"] == ["data"]
    assert "DATASET_DIR" in found["data"][1]


def test_a_wrong_key_is_red_and_the_machine_is_still_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = look(capsys, "modl=rnnt")
    assert code == 2
    assert found["recipe"] == ("red", "modl: there is no such key; did you mean 'model'?")
    assert found["audio"][0] == "green"
    assert "cpu (fp32 bf16)" in found["devices"][1]
    assert "hpu: habana_frameworks is not installed" in found["devices"][1]


def test_a_precision_that_the_device_lacks_is_red(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = look(capsys, *TINY, "precision=fp16")
    assert code == 4
    assert found["device"][0] == "red"
    assert "precision=fp32" in found["device"][1]


GAUDI = (*(a for a in TINY if not a.startswith("device.")), "device=hpu")


def test_run_describes_a_recipe_for_an_absent_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe").mkdir()
    choices = "defaults: [override /model: rnnt, override /data: digits, override /device: hpu]"
    (tmp_path / "recipe" / "mine.yaml").write_text(f"# @package _global_\n{choices}\n")
    arguments = [word for word in GAUDI if not word.startswith(("recipe=", "device="))]
    code, lines = look(capsys, "--config-dir", str(tmp_path), "recipe=mine", *arguments)
    assert (code, lines["device"][0]) == (0, "amber")
    assert "habana_frameworks" in lines["device"][1]
    assert lines["launcher"] == ("green", "auto, ranks: 1, hosts: 1")
    assert "weights, gradients, state and average take" in lines["optimizer"][1]
    assert "MiB" in lines["shapes"][1]
    assert lines["parts"][0] == "green"
    assert "one step" not in lines


def test_run_names_the_missing_program_of_a_launcher(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speechtrain.rank.build.build_task", lambda run: 1 / 0)
    monkeypatch.setattr("shutil.which", lambda name: None)
    _, lines = look(capsys, *TINY, "launcher=slurm")
    assert lines["launcher"][0] == "amber"
    assert "there is no sbatch on this machine" in lines["launcher"][1]


def test_a_launcher_that_cannot_be_built_is_red(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = look(capsys, *TINY, "launcher=slurm", "launcher.time=soon")
    assert code == 2
    assert lines["recipe"][0] == "green"
    assert lines["launcher"][0] == "red"
    assert "time=soon: write it as minutes" in lines["launcher"][1]
    assert "model" not in lines


@pytest.mark.parametrize(
    "launcher",
    [
        ("launcher=slurm", "launcher.nodes=2"),
        ("launcher=ssh", "launcher.hostfile=hosts"),
        ("launcher=mpi", "launcher.hostfile=hosts"),
    ],
)
def test_host_memory_is_for_the_ranks_of_one_host(launcher: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a  # the first\nb\n")
    config = compose(["device=hpu", "world_size=16", *launcher])
    finding = doctor._host_memory_finding(run_config(config), part_of(config, "device").build())
    assert finding.text.endswith("for 8 cards asks for 512 GiB a host")


@pytest.mark.parametrize(
    ("plugin", "torch_version", "subject", "state", "text"),
    [
        ("1.22.2.32", "2.7.1+git1", "release", "green", "is built for torch 2.7"),
        ("1.19.0.561", "2.7.1+git1", "torch", "red", "is built for torch 2.5, and torch 2.7.1+git1 has"),
        ("1.24.1.482", "2.10.0+git1", "torch", "red", "is built for torch 2.11, and torch 2.10.0+git1 has"),
        ("1.24.0.1007", "2.10.0a0+git1", "release", "green", "is built for torch 2.10"),
        ("1.22.2.32", "2.7.1+cu126", "torch", "red", "2.7.1+cu126 is not the vendor's build"),
        ("1.99.0.1", "2.7.1", "release", "amber", "is not in the table of docs/devices.md"),
    ],
)
def test_the_release_of_a_vendors_plugin_fits_one_torch(
    plugin: str, torch_version: str, subject: str, state: str, text: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = tmp_path / f"habana_torch_plugin-{plugin}.dist-info"
    folder.mkdir()
    lines = f"Metadata-Version: 2.1\nName: habana-torch-plugin\nVersion: {plugin}\n"
    (folder / "METADATA").write_text(lines)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("torch.__version__", torch_version)
    config = compose([*GAUDI, "run_dir=run"])
    finding = next(doctor._vendor_findings(run_config(config), part_of(config, "device").build()))
    assert (finding.subject, finding.state) == (subject, state)
    assert text in finding.text


def test_a_torch_that_replaced_the_vendors_is_red(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is installed, so the device is not only absent, and the exit code says so."""
    (tmp_path / "habana_frameworks" / "torch").mkdir(parents=True)
    (tmp_path / "habana_frameworks" / "torch" / "required_version.txt").write_text("2.7.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("speechtrain.rank.build.build_task", lambda run: 1 / 0)
    code, lines = look(capsys, *GAUDI)
    assert code == 4
    assert lines["device"][0] == "red"
    assert "--no-deps" in lines["device"][1]


def test_varying_shapes_are_unfit_for_gaudi(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = look(capsys, *GAUDI, "data.shapes=0")
    assert found["shapes"][0] == "red"
    assert "data.shapes=8" in found["shapes"][1]


def test_the_8_bit_optimizer_suits_an_absent_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is missing (extra 'memory')")
    recipe = [word for word in TINY if not word.startswith("device.")]
    code, found = look(capsys, *recipe, "device=cuda", "optimizer=adamw8bit")
    assert code == 0, found
    assert found["optimizer"][0] == "green"


def test_the_rehearsal_takes_a_step() -> None:
    """In a process of its own, because a process has one lazy device, and other tests use it, too."""
    tiny = [word for word in TINY if not word.startswith("device.")]
    tiny += ["data.shapes=1", "data.batch.count=2", "encoder.features.mels=20", "decoder.max_symbols=8"]
    command = [sys.executable, "-m", "speechtrain.commands.doctor", *tiny, "device=lazy"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout
    assert re.search(r"^green  one step ", process.stdout, re.MULTILINE), process.stdout


def test_transcripts_are_held_against_symbols_and_frames(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = []
    for i, text in enumerate(["one two", "one 2", "o" * 20, "three"] * 3):
        soundfile.write(tmp_path / f"{i}.wav", 0.1 * np.random.default_rng(i).standard_normal(8_000), 16_000)
        entries.append({"audio_filepath": f"{i}.wav", "duration": 0.5, "text": text})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, entries)))
    own = ["data=manifest", "data.train=a.jsonl", "data.valid.dev=a.jsonl"]
    tiny = [argument for argument in TINY if not re.match(r"data\.(train|valid)\.", argument)]
    assert doctor.run([*tiny, *own]) == 0
    output = capsys.readouterr().out
    lines = "\n".join(line for line in output.splitlines() if line.startswith("amber  data"))
    assert "3 of 12 recordings (0.00 of 0.00 h) cannot be used (3 unknown_symbol" in lines
    assert "data.valid.dev: 3 of 12 transcripts have symbols without a label ('2')" in lines
    assert "20 labels and 9 frames" in lines
    assert re.search("^green +one step", output, re.MULTILINE)


def test_a_disk_that_is_read_only_or_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert doctor._space_finding("disk", tmp_path / "not" / "made", "OUTPUT_DIR").state != doctor.RED
    monkeypatch.setattr("os.access", lambda path, mode: False)
    finding = doctor._space_finding("disk", tmp_path, "OUTPUT_DIR")
    assert finding.state == doctor.RED
    assert "Set OUTPUT_DIR" in finding.text


_DEVICE = """
import os
from dataclasses import dataclass

from speechtrain.devices.lazy import Lazy


@dataclass(eq=False)
class Early(Lazy):
    def environment(self, processes):
        return {"READ_BY_ITS_LIBRARY": "1"}

    def open(self, local_rank):
        print("opened with", os.environ["READ_BY_ITS_LIBRARY"])
        super().open(local_rank)
"""


def test_a_command_starts_again_with_the_variables_of_its_device(tmp_path: Path) -> None:
    (tmp_path / "conf" / "device").mkdir(parents=True)
    (tmp_path / "early.py").write_text(_DEVICE)
    lines = ["# @package _global_", "device:", "  _target_: early.Early", "data:", "  shapes: 8"]
    (tmp_path / "conf" / "device" / "early.yaml").write_text("\n".join(lines))
    command = [str(Path(sys.executable).parent / "speechtrain-doctor"), "-cd", "conf", "device=early"]
    done = subprocess.run(
        [*command, "data.train=missing.jsonl", "recipe=demo"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), ALLOW_TARGETS: "early"},
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "opened with 1" in done.stdout, done.stdout + done.stderr


def test_an_optimizer_without_its_library_is_red(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    adamw8bit._library.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    code, found = look(capsys, *TINY, "optimizer=adamw8bit")
    assert code == 4
    state, text = found["optimizer"]
    assert state == "red"
    assert "pip install -e '.[memory]'" in text


def test_an_optimizer_with_its_library_is_green(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is missing (extra 'memory')")
    code, found = look(capsys, *TINY, "optimizer=adamw8bit")
    assert code == 0
    state, text = found["optimizer"]
    assert state == "green"
    assert re.fullmatch(
        r"AdamW8bit, weights, gradients, state and average take 0\.\d\d GiB of each rank", text
    )
    assert found["bitsandbytes"] == ("green", metadata.version("bitsandbytes"))
