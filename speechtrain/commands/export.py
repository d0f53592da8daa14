"""speechtrain export: models between runs, fairseq and Hugging Face, and graphs for runtimes."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from speechtrain.commands._card import add_card_options, card_options, write_card
from speechtrain.commands._cli import Parser, console, parse_context
from speechtrain.errors import ConfigError, MachineError
from speechtrain.files import writing

if TYPE_CHECKING:
    from speechtrain.inference.loaded_run import LoadedRun
    from speechtrain.inference.open_run import OpenedRun

_OURS = "speechtrain"
_FORMATS = (_OURS, "fairseq", "huggingface")
_ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_RUNTIMES = {"onnx": _ONNX_PACKAGES, "sherpa": (*_ONNX_PACKAGES, "sherpa_onnx")}
"""The packages that an export for a runtime needs."""
_FIX = "name another path"  # for --out


def parser() -> Parser:
    build = Parser(
        prog="speechtrain export",
        description="Convert models: a run to Hugging Face (wav2vec 2.0 or FastConformer) or to "
        "fairseq (wav2vec 2.0) by --to, a wav2vec 2.0 checkpoint of fairseq or Hugging Face to a run's form "
        "by --from, or one of the two to the other by both options. "
        "Every conversion runs the model of Hugging Face and the one of speechtrain on the same audio. If "
        "they differ by more than 1e-4, it writes nothing. --to onnx writes a recogniser for ONNX Runtime, "
        "and --to sherpa for sherpa-onnx. Its texts on the evaluation sets must be the texts of the run. If "
        "the run has encoder.causal=true, the recogniser reads a stream.",
        examples=[
            "speechtrain export RUN --to huggingface --out FOLDER",
            "speechtrain export RUN --to onnx --out FOLDER",
            "speechtrain export RUN --to sherpa --out FOLDER",
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
    build.add_argument(
        "--to", dest="form", choices=(*_FORMATS, *_RUNTIMES), default=_OURS, help=f"default {_OURS}"
    )
    build.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="PATH",
        help="directory to write, or a .pt file with --to fairseq",
    )
    build.add_argument("--checkpoint", default="best", help="of a run: best (default), last or a name")
    build.add_argument("--encoder", action="store_true", help="write the encoder only (Wav2Vec2Model)")
    build.add_argument(
        "--features",
        choices=("inside", "outside"),
        default="inside",
        help="with --to onnx: in the graph of the encoder, which then reads the waveform (default), or in a "
        "graph of their own",
    )
    build.add_argument(
        "--context",
        type=parse_context,
        metavar="L,C,R",
        help="with --to onnx or sherpa, and encoder.causal=true: frames before a chunk, in it and after it, "
        "which is 0 (default: the context of the run's streams)",
    )
    build.add_argument("--force", action="store_true", help="replace existing files at --out")
    add_card_options(build)
    return build


def run(argv: list[str]) -> int:
    """Convert a model and write its card. Return the exit code. Raises a SpeechtrainError."""
    arguments = parser().parse_with_run(argv)
    options = card_options(arguments)
    form = arguments.form
    if arguments.source_form == form:
        raise ConfigError(f"--from and --to are both {form}. Name another format, such as --to huggingface")
    _check_free(arguments.out, form, arguments.force)
    if form in _RUNTIMES:
        _export_runtime(arguments)
    elif arguments.source_form == _OURS:
        from speechtrain.inference.open_run import open_run
        from speechtrain.interop.parakeet_hf import has_fastconformer

        # The device of the training may be absent here.
        opened = open_run(arguments.source, arguments.checkpoint, ["device=cpu", "precision=fp32"])
        # "best" of a run in progress changes, and the model card needs the checkpoint that was exported.
        arguments.checkpoint = opened.checkpoint.name
        if form == "huggingface" and has_fastconformer(opened.task):
            _export_fastconformer(opened, arguments.out)
        else:
            _convert(arguments, opened)
    else:
        _convert(arguments, None)
    if options:
        write_card(arguments, options)
    return 0


def _convert(arguments: argparse.Namespace, opened: OpenedRun | None) -> None:
    """Convert the wav2vec 2.0 model of a run, or of the other project's file, and print how it was checked.

    If it raises a SpeechtrainError, no file is written.
    """
    from speechtrain.interop import wav2vec2_fairseq, wav2vec2_hf
    from speechtrain.interop.pretrained import describe, describe_encoder
    from speechtrain.interop.weights import check_fairseq, read_fairseq, write_imported

    form, out = arguments.form, arguments.out
    updates = 0  # of the training
    differences: list[float | None] = []  # to Hugging Face's model. None: transformers is not installed
    if opened is not None:
        updates = int(opened.checkpoint.name.partition("-")[2])
        describe_part = describe_encoder if arguments.encoder else describe
        pretrained = describe_part(opened.task, opened.task.state_dict())
    elif arguments.source_form == "huggingface":
        pretrained, difference = wav2vec2_hf.read(arguments.source)
        differences.append(difference)
    else:
        pretrained, fairseq_difference = read_fairseq(arguments.source)
        differences.append(fairseq_difference)
    if arguments.encoder:
        pretrained = pretrained.encoder_only()
    with writing(f"--out {out}", _FIX):
        if form == "huggingface":
            differences.append(wav2vec2_hf.write(pretrained, out))
        elif form == "fairseq":
            content = wav2vec2_fairseq.checkpoint_of(pretrained, updates)
            differences.append(check_fairseq(pretrained, out))
            wav2vec2_fairseq.write(pretrained, content, out)
        else:
            write_imported(pretrained, out)
    kind = "encoder"
    if pretrained.model:
        kind = "pretraining model"
    elif pretrained.labels:
        kind = "CTC model"
    print(f"{out}: {kind}, {len(pretrained.weights)} tensors, {pretrained.values:,} values")
    measured_differences = [difference for difference in differences if difference is not None]
    if measured_differences:
        largest = max(measured_differences)
        print(f"checked against Hugging Face's model on the same audio: largest difference {largest:.1e}")
    else:
        print("NOT checked against Hugging Face's model: it needs pip install -e '.[interop]'")
    if "fairseq" in (arguments.source_form, form):
        print("not run in fairseq itself. docs/interchange.md has the commands for that")


def load_for_onnx(run_directory: Path, checkpoint: str) -> LoadedRun:
    """Load a run on the CPU in fp32, the device and precision of the comparison."""
    from speechtrain.inference.loaded_run import load

    return load(run_directory, "device=cpu", "precision=fp32", checkpoint=checkpoint)


def _export_runtime(arguments: argparse.Namespace) -> None:
    """Write a run as graphs for ONNX Runtime or sherpa-onnx, and print how they were checked.

    ``arguments.checkpoint`` becomes the name of the checkpoint, which the model card needs.
    """
    form = arguments.form
    if arguments.source_form != _OURS or arguments.encoder:
        raise ConfigError(f"--to {form} writes a run's recogniser. Remove --from and --encoder")
    try:
        for package in _RUNTIMES[form]:
            importlib.import_module(package)
    except ImportError as error:
        raise MachineError(f"--to {form}: {error}. Install it: pip install -e '.[export]'") from None
    from speechtrain.export import onnx_folder
    from speechtrain.export.streaming_graphs import stream_context
    from speechtrain.interop.wav2vec2_hf import replacing_files

    loaded = load_for_onnx(arguments.source, arguments.checkpoint)
    arguments.checkpoint = loaded.checkpoint.name
    context = stream_context(loaded.opened.task, arguments.context)
    with writing(f"--out {arguments.out}", _FIX), replacing_files(arguments.out) as folder:
        if form == "sherpa":
            from speechtrain.export import sherpa_folder, sherpa_stream

            if context is None:
                lines = sherpa_folder.write(loaded, folder)
            else:
                lines = sherpa_stream.write(loaded, folder, context)
        elif context is None:
            lines = onnx_folder.write(loaded, folder, has_features=arguments.features == "inside")
        else:
            lines = onnx_folder.write_stream(loaded, folder, context)
    if context is not None:
        print(f"a stream with the context {list(context)}: a chunk of {context[1]} frames")
    print(f"{arguments.out}: python recognise.py RECORDING")
    for line in lines:
        print(line)


def _export_fastconformer(opened: OpenedRun, out: Path) -> None:
    """Write a run's FastConformer recogniser as Parakeet or Nemotron, and print how it was checked."""
    from speechtrain.interop import parakeet_hf

    with writing(f"--out {out}", _FIX):
        task, part = parakeet_hf.exportable_part(opened.task)
        difference = parakeet_hf.write(task, task.state_dict(), out)
    print(
        f"{out}: {parakeet_hf.family(task)}, {part}, checked against Hugging Face's model on the same audio: "
        f"largest difference {difference:.1e}"
    )


def _check_free(out: Path, form: str, force: bool) -> None:
    """Raise ConfigError if ``out`` is of the wrong kind, or exists and ``force`` is not set."""
    if form == "fairseq" and out.is_dir():
        raise ConfigError(f"--out {out} is a directory. Name the .pt file to write")
    if form != "fairseq" and out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file. Name a directory")
    if not force and out.exists() and (out.is_file() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists. Name another path, or add --force to replace its files")


main = console(run)

if __name__ == "__main__":
    main()
