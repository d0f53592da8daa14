"""Index of a million cuts, and resume at 90 and 99 % of an epoch: time and memory to the first batch.

    python benchmarks/data_resume.py [--cuts 1000000] [--audio FOLDER] [--out FILE.md]

Writes a lhotse and a NeMo manifest over a few WAV files into a temporary folder, and a Shar (of a
tenth of the cuts, as NeMo lines without durations are, whose audio's headers are read), builds their
indexes, and measures each resume in a process of its own, from the moment when torch and lhotse are
imported. Memory is the peak of that process, and its increase over what the imports have left.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

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
    """All measurements, as Markdown."""
    files = sorted(audio.rglob("*.wav"))[:100] if audio else embedded(folder)
    rows = []
    for kind, write, share in KINDS:
        path = folder / kind.replace(" ", "-")
        write(path, cuts // share, files)
        case: dict[str, Any] = {"train": str(path), "index_only": True}
        title = f"{kind}, {cuts // share:,} cuts"
        rows.append((f"{title}: build the index ({size_of(path) / 2**20:.0f} MiB), once", measured(case)))
        for name, options in list(CASES.items())[: 1 if share > 1 else None]:
            rows.append((f"{title}: {name}", measured({"train": str(path), **options})))
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    lines = [f"| {cuts:,} cuts | s | CPU s | peak MiB | increase MiB |", "|---|---|---|---|---|"]
    for title, r in rows:
        lines.append(
            f"| {title} | {r['s']:.2f} | {r['cpu']:.2f} | {r['peak']:.0f} | {r['peak'] - r['before']:.0f} |"
        )
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end"
    return "\n".join([f"{date.today()}, Python {platform.python_version()}, {machine}.", "", *lines, ""])


COUNT = {"count": 16}
CASES: dict[str, dict[str, Any]] = {
    "resume at 90 %, 16 utterances, no workers": {"workers": 0, "batch": COUNT, "percent": 90},
    "resume at 99 %, 16 utterances, no workers": {"workers": 0, "batch": COUNT},
    "the same, 1 worker": {"workers": 1, "batch": COUNT},
    "the same, by total duration": {"workers": 0, "batch": {"count": None, "seconds": 120.0}},
    "the same, check() included": {"workers": 0, "batch": COUNT, "check": True},
}


def child(case: dict[str, Any], is_smoke: bool = False) -> dict[str, float]:
    """One measurement in a process of its own, of a smoke test the last one of each manifest."""
    if is_smoke and not case.get("check"):
        return measure(case)
    command = [sys.executable, __file__, "--child", json.dumps(case)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, float] = json.loads(out.splitlines()[-1])
    return result


def measure(case: dict[str, Any]) -> dict[str, float]:
    """Seconds, CPU seconds and memory in MiB of one case, in this process."""
    import lhotse  # noqa: F401 - its import is not what is measured
    import torch  # noqa: F401

    from speechtrain.data.index import open_index
    from speechtrain.data.module import SpeechData
    from speechtrain.data.sampler import BatchLimits
    from speechtrain.data.sources import open_source
    from speechtrain.text.vocabulary import Characters

    before, begun, cpu = resident(), time.perf_counter(), time.process_time()
    if case.get("index_only"):
        open_index(open_source(case["train"]))
    else:
        packing = BatchLimits(**case["batch"])
        data = SpeechData(
            case["train"], {}, Characters(), batch=packing, speed=[0.9, 1.1], workers=case["workers"]
        )
        if case.get("check"):
            data.check()
        length = data.micro_batches_per_epoch
        position = length * int(case.get("percent", 99)) // 100
        data.load_state_dict({**data.state_dict(), "epoch": 0, "position": position})
        batch = next(data.train())
        assert batch.utterances == len(batch.ids), batch.skipped
        assert (batch.epoch, batch.index) == (0, position)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result = {
        "s": time.perf_counter() - begun,
        "cpu": time.process_time() - cpu,
        "before": before,
        "peak": peak,
    }
    if not case.get("index_only"):
        data.close()
    return result


def resident() -> float:
    """MiB of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def embedded(folder: Path) -> list[Path]:
    """The words of the embedded corpus as WAV files."""
    import soundfile

    from speechtrain.data.corpora.digits import Digits

    clips = Digits("valid").clips
    files = []
    for number in range(100):
        files.append(folder / f"{number:03d}.wav")
        soundfile.write(files[-1], clips.read(number), 16_000)
    return files


def write_lhotse(path: Path, cuts: int, files: list[Path]) -> None:
    """A lhotse cut manifest that goes round the files."""
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
    """A NeMo manifest that goes round the files, with their durations if they are ``measured``."""
    import soundfile

    durations = [soundfile.info(file).duration for file in files]
    with path.open("w") as out:
        for i in range(cuts):
            text = WORDS[i % 10]
            line = {
                "audio_filepath": str(files[i % len(files)]),
                "duration": durations[i % len(files)] if measured else None,
                "text": text,
            }
            out.write(json.dumps(line) + "\n")


def write_shar(path: Path, cuts: int, files: list[Path]) -> None:
    """A Shar in lhotse's layout, 1,000 cuts a shard, that goes round the files."""
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
                    about = json.dumps(cut["recording"]).encode()
                    for kind, content in (("wav", contents[number % len(files)]), ("json", about)):
                        info = tarfile.TarInfo(f"{cut['id']}.{kind}")
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))
    (path / "all").unlink()


def size_of(path: Path) -> int:
    """Bytes of a file, or of the files in a folder."""
    return sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))


KINDS: list[tuple[str, Callable[..., None], int]] = [
    ("lhotse", write_lhotse, 1),
    ("NeMo", write_nemo, 1),
    ("NeMo without durations", partial(write_nemo, measured=False), 10),
    ("Shar", write_shar, 10),
]
"""Title, what writes it, and by which the number of cuts is divided."""


if __name__ == "__main__":
    main()
