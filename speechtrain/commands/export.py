"""speechtrain export: convert wav2vec 2.0 models between runs, fairseq and Hugging Face."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from speechtrain.commands._cli import Parser, console
from speechtrain.errors import ConfigError
from speechtrain.files import writing

if TYPE_CHECKING:
    from speechtrain.interop.pretrained import Pretrained

_OURS = "speechtrain"
_FORMATS = (_OURS, "fairseq", "huggingface")


def parser() -> Parser:
    build = Parser(
        prog="speechtrain export",
        description="Convert wav2vec 2.0 models: a run to fairseq or Hugging Face (--to), one of their "
        "checkpoints to ours (--from), or theirs to each other (both). Every conversion runs Hugging Face's "
        "model and ours on the same audio, and writes nothing if they differ by more than 1e-4.",
        examples=[
            "speechtrain export RUN --to huggingface --out FOLDER",
            "speechtrain export checkpoint.pt --from fairseq --out DIR",
            "speechtrain train --config-dir DIR model=imported init_from=DIR    # or encoder=imported",
        ],
        exit_codes="0 done, 2 usage, 3 a file that cannot be used or models that differ, "
        "4 transformers is missing or --out cannot be written, 5 no run or no usable checkpoint",
    )
    build.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="run directory (also run_dir=RUN), fairseq .pt file or Hugging Face directory",
    )
    build.add_argument(
        "--from", dest="source_form", choices=_FORMATS, default=_OURS, help=f"default {_OURS}: a run"
    )
    build.add_argument("--to", dest="form", choices=_FORMATS, default=_OURS, help=f"default {_OURS}")
    build.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="PATH",
        help="directory to write; a .pt file with --to fairseq",
    )
    build.add_argument("--checkpoint", default="best", help="of a run: best (default), last or a name")
    build.add_argument("--encoder", action="store_true", help="write the encoder only (Wav2Vec2Model)")
    build.add_argument("--force", action="store_true", help="replace existing files at --out")
    return build


def run(argv: list[str]) -> int:
    """Convert and print what was checked. Raises a SpeechtrainError; then no file is written."""
    arguments = parser().parse_with_run(argv)
    if arguments.source_form == arguments.form:
        raise ConfigError(
            f"--from and --to are both {arguments.form}; name another format, such as --to huggingface"
        )
    out: Path = arguments.out
    _check_free(out, arguments.form, arguments.force)
    if (arguments.source_form, arguments.form) == (_OURS, "huggingface") and (
        written := _recogniser(arguments)
    ):
        print(written)
        return 0
    pretrained, updates, differences = _read(arguments)
    if arguments.encoder:
        pretrained = pretrained.encoder_only()
    with writing(f"--out {out}", "name another path"):
        differences.append(_write(pretrained, arguments.form, out, updates=updates))
    kind = "pretraining model" if pretrained.model else "CTC model" if pretrained.labels else "encoder"
    print(f"{out}: {kind}, {len(pretrained.weights)} tensors, {pretrained.values:,} values")
    known = [value for value in differences if value is not None]
    if known:
        print(f"checked against Hugging Face's model on the same audio: largest difference {max(known):.1e}")
    else:
        print("NOT checked against Hugging Face's model: it needs pip install -e '.[interop]'")
    if "fairseq" in (arguments.source_form, arguments.form):
        print("not run in fairseq itself; docs/interchange.md has the commands for that")
    return 0


def _recogniser(arguments: argparse.Namespace) -> str:
    """Write a run's FastConformer recogniser as Parakeet; what was written, or empty for another encoder."""
    from speechtrain.inference.open_run import open_run
    from speechtrain.interop import parakeet_hf

    opened = open_run(arguments.source, arguments.checkpoint, ["device=cpu", "precision=fp32"])
    if not parakeet_hf.has_encoder(opened.task):
        return ""
    with writing(f"--out {arguments.out}", "name another path"):
        task, part = parakeet_hf.exportable_part(opened.task)
        difference = parakeet_hf.write(task, task.state_dict(), arguments.out)
    return (
        f"{arguments.out}: Parakeet, {part}, checked against Hugging Face's model on the same audio: largest "
        f"difference {difference:.1e}"
    )


def _check_free(out: Path, form: str, force: bool) -> None:
    if form == "fairseq" and out.is_dir():
        raise ConfigError(f"--out {out} is a directory; name the .pt file to write")
    if form != "fairseq" and out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; name a directory")
    if not force and out.exists() and (out.is_file() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists; name another path, or add --force to replace its files")


def _read(arguments: argparse.Namespace) -> tuple[Pretrained, int, list[float | None]]:
    """Read the source: the model, its number of updates, and the differences that its check found."""
    from speechtrain.interop import wav2vec2_hf
    from speechtrain.interop.pretrained import describe
    from speechtrain.interop.weights import read_fairseq

    source, form = arguments.source, arguments.source_form
    if form == "huggingface":
        pretrained, difference = wav2vec2_hf.read(source)
        return pretrained, 0, [difference]
    if form == "fairseq":
        pretrained, checked = read_fairseq(source)
        return pretrained, 0, [checked]
    from speechtrain.inference.open_run import open_run

    # the device of the training may be missing here
    opened = open_run(source, arguments.checkpoint, ["device=cpu", "precision=fp32"])
    updates = int(opened.checkpoint.name.partition("-")[2])
    return describe(opened.task, opened.task.state_dict(), arguments.encoder), updates, []


def _write(pretrained: Pretrained, form: str, out: Path, updates: int) -> float | None:
    from speechtrain.interop import wav2vec2_fairseq, wav2vec2_hf
    from speechtrain.interop.weights import check_fairseq, write_imported

    if form == "huggingface":
        return wav2vec2_hf.write(pretrained, out)
    if form == "fairseq":
        content = wav2vec2_fairseq.checkpoint_of(pretrained, updates)
        difference = check_fairseq(pretrained, out)
        wav2vec2_fairseq.write(pretrained, content, out)
        return difference
    write_imported(pretrained, out)
    return None


main = console(run)

if __name__ == "__main__":
    main()
