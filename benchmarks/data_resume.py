"""Index of a million cuts, and resume at 90 and 99 % of an epoch: time and memory to the first batch.

    python benchmarks/data_resume.py [--cuts 1000000] [--audio FOLDER] [--out FILE.md]

The program writes four data sets over a few WAV files into a temporary folder: a lhotse manifest, a NeMo
manifest, a NeMo manifest without durations and a Shar. The last two have a tenth of the cuts. (Without
durations, the index needs the header of each audio file.) The program then builds the indexes and measures
each resume in a separate process, after the imports of torch and lhotse. Memory is the peak of that process,
and its increase since the imports.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring import machine

if TYPE_CHECKING:
    from speechtrain.data.module import SpeechData

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cuts", type=int, default=1_000_000)
    parser.add_argument("--audio", type=Path, help="folder of WAV files (default: the embedded digits)")
    parser.add_argument("--out", type=Path, help="write the report here, too")
    parser.add_argument("--smoke", action="store_true", help="300 cuts, measured in one process")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(json.loads(arguments.child))))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPEECHTRAIN_CACHE"] = f"{folder}/cache"
        if arguments.smoke:
            arguments.cuts = 300
        measured = partial(child, is_smoke=arguments.smoke)
        report = run(Path(folder), arguments.cuts, arguments.audio, measured)
    print(report)
    if arguments.out:
        arguments.out.write_text(report)


def run(folder: Path, cuts: int, audio: Path | None, measured: Callable[..., dict[str, float]]) -> str:
    """Return all measurements as Markdown."""
    files = sorted(audio.rglob("*.wav"))[:100] if audio else embedded(folder)
    rows = []
    for kind, write, share in KINDS:
        path = folder / kind.replace(" ", "-")
        write(path, cuts // share, files)
        case: dict[str, Any] = {"train": str(path), "index_only": True}
        title = f"{kind}, {cuts // share:,} cuts"
        rows.append((f"{title}: build the index ({size_of(path) / 2**20:.0f} MiB), once", measured(case)))
        for name, options in CASES.items():
            rows.append((f"{title}: {name}", measured({"train": str(path), **options})))
            if share > 1:
                break  # A smaller set has the first case only.
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return f"{machine()}\n\n{table(f'{cuts:,} cuts', rows)}\n"


def table(head: str, rows: list[tuple[str, dict[str, float]]]) -> str:
    lines = [f"| {head} | s | CPU s | peak MiB | increase MiB |", "|---|---|---|---|---|"]
    for title, case_figures in rows:
        seconds, cpu, peak = case_figures["s"], case_figures["cpu"], case_figures["peak"]
        increase = peak - case_figures["before"]
        lines.append(f"| {title} | {seconds:.2f} | {cpu:.2f} | {peak:.0f} | {increase:.0f} |")
    return "\n".join(lines)


COUNT = {"count": 16}
CASES: dict[str, dict[str, Any]] = {
    "resume at 90 %, 16 utterances, no workers": {"workers": 0, "batch": COUNT, "percent": 90},
    "resume at 99 %, 16 utterances, no workers": {"workers": 0, "batch": COUNT},
    "the same, 1 worker": {"workers": 1, "batch": COUNT},
    "the same, by total duration": {"workers": 0, "batch": {"count": None, "seconds": 120.0}},
    "the same, check() included": {"workers": 0, "batch": COUNT, "check": True},
}


def child(case: dict[str, Any], is_smoke: bool = False) -> dict[str, float]:
    """Measure a case in a separate process. A smoke test starts one only for the last case of a manifest."""
    if is_smoke and not case.get("check"):
        return measure(case)
    command = [sys.executable, __file__, "--child", json.dumps(case)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures: dict[str, float] = json.loads(out.splitlines()[-1])
    return figures


def measure(case: dict[str, Any]) -> dict[str, float]:
    """Return the seconds, CPU seconds and memory in MiB of one case, measured in this process."""
    import lhotse  # noqa: F401 - The import comes before the clock starts.
    import torch  # noqa: F401

    import speechtrain.data.index
    import speechtrain.data.module
    import speechtrain.data.sources
    import speechtrain.text.vocabulary

    memory_before, start, cpu_start = resident(), time.perf_counter(), time.process_time()
    data = None
    if case.get("index_only"):
        speechtrain.data.index.open_index(speechtrain.data.sources.open_source(case["train"]))
    else:
        data = resume(case)
    figures = {
        "s": time.perf_counter() - start,
        "cpu": time.process_time() - cpu_start,
        "before": memory_before,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if data is not None:
        data.close()
    return figures


def resume(case: dict[str, Any]) -> SpeechData:
    """Resume an epoch at the position of a case and load the first batch. Return the open data."""
    from speechtrain.data.module import SpeechData
    from speechtrain.data.sampler import BatchLimits
    from speechtrain.text.vocabulary import Characters

    limits = BatchLimits(**case["batch"])
    data = SpeechData(
        case["train"], {}, Characters(), batch=limits, speed=[0.9, 1.1], workers=case["workers"]
    )
    if case.get("check"):
        data.check()
    position = data.micro_batches_per_epoch * int(case.get("percent", 99)) // 100
    data.load_state_dict({**data.state_dict(), "epoch": 0, "position": position})
    batch = next(data.train())
    assert batch.utterances == len(batch.ids), batch.skipped
    assert (batch.epoch, batch.index) == (0, position)
    return data


def resident() -> float:
    """Return the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def embedded(folder: Path) -> list[Path]:
    """Write 100 words of the embedded corpus as WAV files and return their paths."""
    import soundfile

    from speechtrain.data.corpora.digits import Digits

    clips = Digits("valid").clips
    files = []
    for number in range(100):
        files.append(folder / f"{number:03d}.wav")
        soundfile.write(files[-1], clips.read(number), 16_000)
    return files


def write_lhotse(path: Path, cuts: int, files: list[Path]) -> None:
    """Write a lhotse cut manifest that goes round the files."""
    from lhotse import Recording

    recordings = [Recording.from_file(file).to_dict() for file in files]
    with path.open("w") as out:
        for i in range(cuts):
            recording = recordings[i % len(recordings)]
            name, text = f"cut-{i:07d}", WORDS[i % 10]
            supervision = {"id": name, "recording_id": recording["id"], "start": 0.0, "text": text}
            cut = {
                "id": name,
                "start": 0.0,
                "duration": recording["duration"],
                "channel": 0,
                "supervisions": [{**supervision, "duration": recording["duration"], "channel": 0}],
                "recording": recording,
                "type": "MonoCut",
            }
            out.write(json.dumps(cut) + "\n")


def write_nemo(path: Path, cuts: int, files: list[Path], measured: bool = True) -> None:
    """Write a NeMo manifest that goes round the files, with their durations if they are ``measured``."""
    import soundfile

    durations = [soundfile.info(file).duration for file in files]
    with path.open("w") as out:
        for i in range(cuts):
            duration = durations[i % len(files)] if measured else None
            line = {
                "audio_filepath": str(files[i % len(files)]),
                "duration": duration,
                "text": WORDS[i % 10],
            }
            out.write(json.dumps(line) + "\n")


def write_shar(path: Path, cuts: int, files: list[Path]) -> None:
    """Write a Shar in lhotse's layout, 1,000 cuts a shard, that goes round the files."""
    path.mkdir()
    write_lhotse(path / "all", cuts, files)
    contents = [file.read_bytes() for file in files]
    with (path / "all").open() as lines:
        for shard, first in enumerate(range(0, cuts, 1000)):
            name = f"{shard:06d}"
            with (
                gzip.open(path / f"cuts.{name}.jsonl.gz", "wt", compresslevel=1) as out,
                tarfile.open(path / f"recording.{name}.tar", "w") as tar,
            ):
                for number, line in enumerate(islice(lines, 1000), first):
                    cut = json.loads(line)
                    cut["recording"]["sources"] = [{"type": "shar", "channels": [0], "source": ""}]
                    out.write(json.dumps(cut) + "\n")
                    add_member(tar, f"{cut['id']}.wav", contents[number % len(files)])
                    add_member(tar, f"{cut['id']}.json", json.dumps(cut["recording"]).encode())
    (path / "all").unlink()


def add_member(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    files = [path]
    if path.is_dir():
        files = list(path.iterdir())
    return sum(file.stat().st_size for file in files)


KINDS: list[tuple[str, Callable[..., None], int]] = [
    ("lhotse", write_lhotse, 1),
    ("NeMo", write_nemo, 1),
    ("NeMo without durations", partial(write_nemo, measured=False), 10),
    ("Shar", write_shar, 10),
]
"""The title of each data set, the function that writes it, and the divisor of the number of cuts."""


if __name__ == "__main__":
    main()
