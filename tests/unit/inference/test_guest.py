"""A loaded run is a guest in the program of another: threads, forks and settings of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from speechtrain.inference.loaded_run import LoadedRun, load
from tests.support.digits import write_sample

CALLS = 32
DECODERS: tuple[dict[str, Any], ...] = (
    {"decoder": "greedy", "max_symbols": 3},
    {"decoder": "beam", "width": 2},
    {"decoder": "none"},
)


@pytest.fixture(scope="module")
def loaded(run_dir: Path) -> LoadedRun:
    return load(run_dir)


@pytest.fixture(scope="module")
def wav(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audio") / "a.wav"
    write_sample(path)
    return path


def result(run: LoadedRun, wav: Path, decoder: dict[str, Any]) -> tuple[str, float]:
    (transcript,) = run.transcribe(wav, **decoder)
    return transcript.text, transcript.score


def test_threads_with_several_decoders_get_their_own_results(loaded: LoadedRun, wav: Path) -> None:
    expected = [result(loaded, wav, decoder) for decoder in DECODERS]
    assert len(set(expected)) == len(DECODERS)
    calls = [number % len(DECODERS) for number in range(CALLS)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda call: result(loaded, wav, DECODERS[call]), calls))
    assert results == [expected[call] for call in calls]


SNAPSHOT = """
import logging, os, random, sys, warnings
import hydra, numpy, scipy.sparse, torch, urllib3  # These imports add filters of warnings.
from hydra.core.global_hydra import GlobalHydra

RUN, WAV, FOLDER = sys.argv[1:]
open(FOLDER + "/config.yaml", "w").write("answer: 42")
torch.set_num_threads(2)
torch.manual_seed(7)
torch.zeros(9).uniform_()
torch.set_float32_matmul_precision("high")
torch.set_anomaly_enabled(False)
warnings.simplefilter("always")


def state():
    return {
        "random": (random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()),
        "torch": (torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.get_default_dtype()),
        "backends": (torch.backends.cudnn.allow_tf32, torch.backends.mkldnn.enabled, torch.is_grad_enabled()),
        "path": list(sys.path),
        "environment": dict(os.environ),
        "root logger": (list(logging.root.handlers), logging.root.level),
        "warnings": list(warnings.filters),
        "home": os.listdir(FOLDER),
        "hydra": hydra.compose("config"),
    }


def check(step):
    global before
    after = state()
    for key, value in after.items():
        assert value == before[key], (step, key, before[key], value)


with hydra.initialize_config_dir(FOLDER, version_base="1.3"):
    before = state()
    import speechtrain
    from speechtrain.errors import SpeechtrainError

    check("import")
    run = speechtrain.load(RUN, "device.threads=1")
    check("load")
    for decoder in ("greedy", "beam", "best"):
        try:
            run.transcribe([WAV, (numpy.zeros(800, numpy.float32), 8000)], decoder=decoder, batch=2)
        except SpeechtrainError:
            assert decoder == "best"
        check(decoder)
    for transcript in run.transcripts(run.recordings(WAV)):
        check("transcripts")
    run.features(WAV)
    check("features")
print("unchanged")
"""


def ended_program(source: str, *arguments: object, **environment: str) -> tuple[str, str]:
    """Return the output and the errors of a Python program."""
    command = [sys.executable, "-c", source, *map(str, arguments)]
    ended = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=300
    )
    return ended.stdout, ended.stderr


def test_load_and_calls_change_nothing_of_the_process(run_dir: Path, wav: Path, tmp_path: Path) -> None:
    ended = ended_program(SNAPSHOT, run_dir, wav, tmp_path, HOME=str(tmp_path))
    assert ended == ("unchanged\n", "")


NO_HOME = """
import os, pwd, sys

del os.environ["HOME"]
pwd.getpwuid = {}.__getitem__  # A container's user may have no entry.

import speechtrain

assert speechtrain.load(sys.argv[1], "device.threads=1").transcribe(sys.argv[2])
"""


def test_a_user_without_a_home_folder_transcribes(run_dir: Path, wav: Path) -> None:
    assert ended_program(NO_HOME, run_dir, wav) == ("", "")


FORK = """
import os, sys
import torch
import speechtrain
from speechtrain.errors import MachineError

RUN, WAV, IS_WARM = sys.argv[1:]
torch.set_num_threads(2)
run = speechtrain.load(RUN)


def text():
    (transcript,) = run.transcribe(WAV, max_symbols=20)
    return transcript.text


if IS_WARM == "True":
    torch.rand(2000, 200) @ torch.rand(200, 2000)
    text()
child = os.fork()
text_of_process = text()
if child:
    assert os.waitpid(child, 0)[1] == 0  # Otherwise the lines of the two processes may be mixed.
print(text_of_process, flush=True)
if not child:
    try:
        speechtrain.load(RUN)
    except MachineError as error:
        print(error, flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_forked_process_transcribes(run_dir: Path, wav: Path, is_warm: bool) -> None:
    stdout, stderr = ended_program(FORK, run_dir, wav, is_warm)
    first, second, error = sorted(stdout.splitlines(), key=lambda line: "fork" in line)
    assert first == second != ""
    assert error.startswith(f"{run_dir}: a process that has loaded a run was forked. Call speechtrain.load")
    assert stderr == ""


def transcribe_in_new_process(run: LoadedRun, wav: Path) -> str:
    return run.transcribe(wav, max_symbols=20)[0].text


def test_a_run_can_be_sent_to_a_new_process(loaded: LoadedRun, wav: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        text = pool.submit(transcribe_in_new_process, loaded, wav).result()
    assert text == transcribe_in_new_process(loaded, wav)
