"""speechtrain doctor: checks whether this machine, and a given recipe, can train."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING

from speechtrain.commands._cli import Parser, console
from speechtrain.config.resume_fields import key_of
from speechtrain.errors import ConfigError, DataError, MachineError, SpeechtrainError, one_line
from speechtrain.files import whole_path
from speechtrain.runs.choices import choices

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from speechtrain.data.base import DataModule
    from speechtrain.data.index import Index
    from speechtrain.data.module import SpeechData
    from speechtrain.devices.base import Device, DeviceFacts
    from speechtrain.precision import Precision
    from speechtrain.task import Task
    from speechtrain.text.vocabulary import Tokenizer

GREEN, AMBER, RED = "green", "amber", "red"
_PAINT = {GREEN: "\033[32m", AMBER: "\033[33m", RED: "\033[31m"}
_LOOKED_AT = 10_000  # transcripts
_RECORDED = 4  # micro-batches that run under the recorder
_SHOWN = 8  # shapes


def parser() -> Parser:
    build = Parser(
        prog="speechtrain doctor",
        description="Check this machine, and a recipe on it. Takes the arguments of speechtrain train. "
        "Without arguments it checks the defaults. Prints a line for each check: green (fine), amber (works, "
        "with a drawback), red (does not work, and what to do). The last lines are about the recipe: its "
        "config, model, recordings and transcripts, its shapes with their predicted memory, and one training "
        "step of its largest batch. For an accelerator, steps also run on the CPU under a "
        "recorder, with or without that device: does it refuse an operation, a type or a value, does "
        "the host read a value back, does a shape depend on data? If so, the line of code is named; else "
        "operations, bytes and graphs are counted. Writes no file except the data cache that training would "
        "also write (SPEECHTRAIN_CACHE).",
        examples=["speechtrain doctor", "speechtrain doctor recipe=mlperf device=hpu"],
        exit_codes="0 if no line is red, else the code of the first red line: 2 config, 3 data, 4 machine "
        "or training step",
    )
    build.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="also GROUP=CHOICE: the recipe")
    build.add_argument("--config-dir", "-cd", metavar="DIR", help="your own choices of the groups")
    return build


@dataclass(frozen=True)
class Finding:
    """The result of one check: its state, what was checked, what was found and what to do."""

    state: str
    what: str
    found: str
    exit_code: int = MachineError.exit_code  # of a red finding


def run(argv: list[str]) -> int:
    """Print every finding; returns the exit code."""
    arguments = parser().parse_intermixed_args(argv)
    folder: str | None = arguments.config_dir
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"--config-dir {folder}: it is not a folder")
    keys = {key_of(text) for text in arguments.overrides if "=" in text or "~" in text}
    if arguments.overrides and keys <= {"run_dir"}:
        raise ConfigError("the doctor checks a recipe and no run. Name its keys, such as recipe=demo")
    paint = _PAINT if sys.stdout.isatty() else {}
    code = 0
    for finding in findings(arguments.overrides, folder):
        state = f"{paint.get(finding.state, '')}{finding.state:<5}{chr(27) + '[0m' if paint else ''}"
        print(state, end="", file=getattr(sys.stdout, "rich_proxied_file", sys.stdout))
        print(f"  {finding.what:<13} {finding.found}", flush=True)
        if finding.state == RED and not code:
            code = finding.exit_code
    return code


def findings(overrides: list[str], config_dir: str | None) -> Iterator[Finding]:
    """The findings of all checks, the cheapest check first."""
    _restart(overrides, config_dir)
    config: list[DictConfig] = []
    with tempfile.TemporaryDirectory(prefix="speechtrain-doctor-") as folder:
        composing = list(tried("recipe", lambda: composed(config, overrides, config_dir, run_dir=folder)))
        yield from machine()
        yield from packages()
        yield from tried("audio", lambda: f"libsndfile {import_module('soundfile').__libsndfile_version__}")
        yield from composing
        if config:
            yield from recipe(config[0], overrides)


def _restart(overrides: list[str], config_dir: str | None) -> None:
    """Start this command again with the device's variables, before it prints a line or makes a folder.

    A config or a device that is at fault has a line later.
    """
    from speechtrain.config.build import build_device
    from speechtrain.runs.compose import compose
    from speechtrain.runs.on_host import restart_for

    with contextlib.suppress(SpeechtrainError):
        restart_for(build_device(compose(overrides, config_dir)), is_training=True)


def tried(what: str, look: Callable[[], str]) -> Iterator[Finding]:
    """One finding: green with the text that ``look`` returns, or red with the error that it raises."""
    try:
        yield Finding(GREEN, what, look())
    except Exception as error:  # a doctor reports whatever it finds
        yield failure(what, error)


def failure(what: str, error: Exception) -> Finding:
    if isinstance(error, SpeechtrainError):
        return Finding(RED, what, one_line(str(error)), exit_code=error.exit_code)
    return Finding(RED, what, one_line(f"{type(error).__name__}: {error}")[:300])


def machine() -> Iterator[Finding]:
    """Findings on Python, cores, memory, disk and cache."""
    yield Finding(GREEN, "python", platform.python_version())
    yield installation()
    import psutil

    from speechtrain.compute_policy import usable_cpus

    yield Finding(GREEN, "cores", f"{len(usable_cpus())} usable of {os.cpu_count()} ({platform.machine()})")
    memory = psutil.virtual_memory().available / 2**30
    yield Finding(GREEN if memory >= 2 else AMBER, "memory", f"{memory:.1f} GiB available")
    yield _links()
    yield _room("disk", Path(os.environ.get("OUTPUT_DIR") or "runs"), "OUTPUT_DIR")
    from speechtrain.data.cache import cache_folder

    yield _room("cache", cache_folder(), "SPEECHTRAIN_CACHE")


def _links() -> Finding:
    """The finding on network interfaces and accelerator cards: their drivers and states."""
    from speechtrain.devices import links

    are_up, line = links.describe(links.interfaces(), links.cards())
    return Finding(GREEN if are_up else AMBER, "links", line)


def _room(what: str, wanted: Path, variable: str) -> Finding:
    """The finding on whether a folder is writable and has free space."""
    whole = whole_path(wanted)
    folder = next(path for path in (whole, *whole.parents) if path.is_dir())
    if not os.access(folder, os.W_OK):
        return Finding(RED, what, f"{folder} is not writable; set {variable} to a folder that is")
    free = shutil.disk_usage(folder).free / 2**30
    state = GREEN if free >= 5 else AMBER if free >= 0.25 else RED
    found = f"{free:.1f} GiB free at {folder}"
    return Finding(state, what, found + ("" if state == GREEN else f"; set {variable} to a larger disk"))


def installation() -> Finding:
    """The finding on the folders of the program and of its choices, which belong to one installation."""
    program, configs = (Path(import_module(name).__path__[0]) for name in ("speechtrain", "speechtrain.conf"))
    line = f"{program}, choices in {configs}"
    if configs.parent in (program, program.parent):
        return Finding(GREEN, "speechtrain", line)
    return Finding(AMBER, "speechtrain", f"{line}, remove one installation or PYTHONPATH")


def packages() -> Iterator[Finding]:
    for name in ("torch", "hydra-core", "lhotse", "soundfile", "sentencepiece", "safetensors", "tensorboard"):
        try:
            yield Finding(GREEN, name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(RED, name, f"is not installed; pip install {name}")
    with contextlib.suppress(metadata.PackageNotFoundError):  # an extra: its recipe asks for it
        yield Finding(GREEN, "bitsandbytes", metadata.version("bitsandbytes"))
    import torch

    from speechtrain.devices.cpu import has_bf16
    from speechtrain.runs.auto_device import auto_device

    yield devices()
    capability = torch.backends.cpu.get_cpu_capability()
    found = f"{capability}, {torch.get_num_threads()} threads, precision=fp32 or bf16"
    yield Finding(GREEN, "device=cpu", found)
    yield Finding(GREEN, "device=auto", str(auto_device()))
    if not has_bf16():
        yield Finding(AMBER, "bf16", "this chip has no bf16 instructions; precision=bf16 trains in fp32")


def devices() -> Finding:
    """The finding on devices: those of this machine with their precisions, and what the others lack."""
    from speechtrain.config.build import build_device
    from speechtrain.precision import NAMES
    from speechtrain.runs.compose import compose

    here, missing = [], []
    for choice in choices(None)["device"]:
        device = build_device(compose([f"device={choice}"], None))
        if absence := device.absence(1):
            missing.append(one_line(absence).partition(";")[0].removeprefix("device="))
            continue
        able = [name for dtype, name in NAMES.items() if device.supports(dtype)]
        here.append(f"{choice} ({' '.join(able)})")
    absent = f"; not available: {', '.join(missing)}" if missing else ""
    return Finding(GREEN, "devices", f"{', '.join(here)}{absent}")


def composed(config: list[DictConfig], overrides: list[str], config_dir: str | None, run_dir: str) -> str:
    """Compose and check the config of a run; append it to ``config`` if it is valid."""
    from speechtrain.config.check import check
    from speechtrain.runs.auto_device import check_launcher
    from speechtrain.runs.command_line import rewrite
    from speechtrain.runs.compose import compose_with_choices
    from speechtrain.runs.from_data import follow_data, typed_keys
    from speechtrain.runs.recipe_needs import needs_of

    candidate, group_choices = compose_with_choices(rewrite(overrides), config_dir)
    check_launcher(group_choices, candidate)
    candidate.run_dir = run_dir
    if needs := needs_of(candidate):
        raise DataError("; ".join(map(str, needs)))
    check(candidate)
    follow_data(candidate, typed_keys(overrides, {}))
    config.append(candidate)
    return f"{' '.join(overrides) or 'the defaults'}: every key is valid"


def recipe(config: DictConfig, overrides: list[str]) -> Iterator[Finding]:
    """Findings on the device, model, data, transcripts and one training step of a recipe."""
    import torch

    from speechtrain.config.build import build_data, build_device
    from speechtrain.rank.batch_memory import fill_batch_memory, free_batch_memory
    from speechtrain.rank.build import build_task, open_device

    what = "device"
    with contextlib.ExitStack() as stack:
        try:
            device, opened = build_device(config), None
            yield from _vendor_requirements(config, device)
            try:
                device, precision = opened = open_device(config, 0)
                yield Finding(GREEN, what, f"{type(device).__name__}, precision={precision.name}")
            except Exception as error:  # the parts after it are checked without it
                yield _device_failure(error, device, overrides)
            what = "model"
            task, tokenizer = build_task(config)
            if opened:
                task.to(device.tensor(torch.zeros(())).device)
            parameters = sum(p.numel() for p in task.parameters())
            yield Finding(GREEN, what, f"{parameters:,} parameters, {tokenizer.size} classes with the blank")
            yield from tried("optimizer", lambda: _optimizer_name(config, task))
            what = "data"
            fill_batch_memory(config, lambda: free_batch_memory(config, device, task))
            data = build_data(config, tokenizer, task)
            stack.callback(data.close)
            yield from _check_data(config, data, task, tokenizer=tokenizer)
        except Exception as error:  # a doctor reports whatever it finds
            yield failure(what, error)
            return
        if device.static_shapes or not device.on_host:
            watched, _ = build_task(config)
            watched.load_state_dict({name: value.cpu() for name, value in task.state_dict().items()})
            yield from tried("recorder", lambda: recorded(config, device, data, watched))
        if opened:
            yield from _training(config, data, task, *opened)


def _optimizer_name(config: DictConfig, task: Task) -> str:
    from speechtrain.config.build import build_optimizer

    return type(build_optimizer(config, task.parameter_groups())).__name__


def _training(
    config: DictConfig, data: DataModule, task: Task, device: Device, precision: Precision
) -> Iterator[Finding]:
    """Findings on a training step of the largest batch, and on the time of an epoch."""
    from speechtrain.rank.trial_steps import TrialSteps

    rate = int(config.data.get("sample_rate") or 16_000)
    try:
        train = TrialSteps(config, data, task, device, precision)
        yield Finding(GREEN, "one step", train.on_largest(data, rate))
    except Exception as error:  # a doctor reports whatever it finds
        yield failure("one step", error)
        return
    yield from tried("epoch", lambda: train.epoch(data, config.world_size))


def _device_failure(error: Exception, device: Device, overrides: list[str]) -> Finding:
    """The finding on a device that does not open: amber for the absence of an accelerator that was typed.

    In this case the recorder says whether the recipe suits the device.
    """
    finding = failure("device", error)
    is_typed = "device" in map(key_of, overrides)
    return replace(finding, state=AMBER) if is_typed and not device.on_host and device.absence(1) else finding


def _vendor_requirements(config: DictConfig, device: Device) -> Iterator[Finding]:
    """Findings on the torch version of the vendor's plugin, and on host memory."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        if device.facts.plugin:
            yield _plugin_release(device.facts, metadata.version(device.facts.plugin))
    yield from _host_memory(config, device)


def _plugin_release(facts: DeviceFacts, version: str) -> Finding:
    """The finding on whether the vendor built its plugin for the installed version of torch."""
    installed = metadata.version("torch")
    plugin = f"{facts.plugin} {version}"
    for release, torch_version in facts.plugin_torch.items():
        if f"{version}.".startswith(f"{release}."):
            line = f"{plugin} is built for torch {torch_version}, and torch is {installed}"
            if f"{installed}.".startswith(f"{torch_version}."):
                return Finding(GREEN, "release", line)
            return Finding(
                RED, "release", f"{line}; use an image of the vendor, and keep its torch (docs/devices.md)"
            )
    return Finding(
        AMBER, "release", f"{plugin} is not in the table of docs/devices.md, and torch is {installed}"
    )


def _host_memory(config: DictConfig, device: Device) -> Iterator[Finding]:
    """The finding on host memory, for a device whose vendor says how much each process may need."""
    import psutil

    from speechtrain.config.build import build_launcher

    if device.facts.host_gib:
        processes = math.ceil(config.world_size / build_launcher(config).host_count())
        needed = device.facts.host_gib * processes
        memory = psutil.virtual_memory().total / 2**30
        found = f"{memory:.0f} GiB; the vendor's recipe for {processes} cards asks for {needed} GiB a host"
        yield Finding(GREEN if memory >= needed else AMBER, "host memory", found)


def recorded(config: DictConfig, device: Device, data: DataModule, task: Task) -> str:
    """What ``device`` would make of steps of ``task``, which run on the CPU.

    Raises ConfigError if a device with static shapes gets varying ones, and Unfit, naming the line of code,
    for what the device refuses, and what would end or change its graph.
    """
    import torch

    from speechtrain.compute_policy import apply_policy
    from speechtrain.config.build import build_precision
    from speechtrain.devices.recorder import Recorder
    from speechtrain.rank.trial_steps import smallest_batches

    device.validate_shapes(data.shapes())
    precision, recorder = build_precision(config), Recorder(device.facts.operations)
    # on the CPU, where the vendor's kernel does not run
    policy = replace(device.policy(precision.dtype), mark_step=recorder.mark_step, ctc_kernel=None)
    apply_policy(task, policy)
    known = set[tuple[int, ...]]()
    task.train()
    for number, batch in enumerate(smallest_batches(data, _RECORDED)):
        shape = (*batch.audio.shape, *batch.labels.shape)
        for repeat in range(1 if shape in known else 2):  # the first step of a shape makes new tensors
            is_new = shape not in known
            prepared = recorder.move(task.prepare(batch, seed=number + repeat * _RECORDED))
            task.zero_grad()
            with recorder.warm_up() if is_new else recorder, policy.autocast("cpu"):
                loss = task(prepared).total
            with recorder.warm_up() if is_new else recorder:
                torch.autograd.backward(loss)
            recorder.mark_step()
            with recorder.warm_up() if is_new else recorder, torch.no_grad(), policy.autocast("cpu"):
                task.eval()(prepared)
            recorder.mark_step()
            task.train()
            known.add(shape)
    segments = recorder.segments
    graphs = ""
    if device.facts.operations.records:
        graphs = f", {len(segments)} graphs, {recorder.distinct} of them distinct, of up to {max(segments):,}"
    return f"{_RECORDED} micro-batches of {len(known)} shapes: {recorder.costs}{graphs}"


def _check_data(config: DictConfig, data: DataModule, task: Task, tokenizer: Tokenizer) -> Iterator[Finding]:
    """Findings on recordings, shapes, spelling, and labels per encoder frame."""
    from speechtrain.data.module import SpeechData

    data.check()
    shapes, sets = data.shapes(), data.valid()
    fixed = f", {len(shapes)} fixed shapes" if shapes else ""
    found = f"{data.micro_batches_per_epoch} micro-batches an epoch{fixed}; recordings are in place"
    yield Finding(GREEN, "data", found) if sets else Finding(AMBER, "data", f"{found}; no evaluation set")
    for warning in data.warnings():
        yield Finding(AMBER, "data", warning)
    yield shapes_of(config, data, task)
    if not isinstance(data, SpeechData):
        return
    yield from _check_texts(config, data, task, tokenizer)


def _check_texts(config: DictConfig, data: SpeechData, task: Task, tokenizer: Tokenizer) -> Iterator[Finding]:
    """Findings on the recordings that are not used, and on the transcripts of each set."""
    from speechtrain.data.training_set import FILTERS

    counts = [f"{count} {reason}" for reason, count in data.report().items() if reason in FILTERS]
    if counts:
        finding = f"{', '.join(counts)} of {len(data.index)} recordings are not trained on (data.max_seconds)"
        yield Finding(AMBER, "filtered", finding)
    fix = "change tokenizer.normaliser or the vocabulary"
    if "tokenizer=" in str(config.from_data):
        fix = "a character that is so rare has no label"
    rows = {"train": (data.index, data.training_set.rows)}
    for name in data.evaluation_sets.names:
        loader, plan = data.evaluation_sets[name]
        rows[name] = (loader.index, plan.rows)
    for name, (index, numbers) in rows.items():
        sample = numbers[:: len(numbers) // _LOOKED_AT + 1].tolist()
        yield from transcripts(name, index, sample, tokenizer, task, data.sample_rate, fix=fix)


def transcripts(
    name: str,
    index: Index,
    rows: list[int],
    tokenizer: Tokenizer,
    task: Task,
    sample_rate: int,
    fix: str,
) -> Iterator[Finding]:
    """Findings on transcripts that cannot be spelled, and on those with more labels than encoder frames."""
    from speechtrain.data.index import crowded, label_count

    unspelt, symbols = 0, set[str]()
    for row in rows:
        text = index.text(row, tokenizer.normalise)
        if label_count(text, tokenizer) < 0:
            unspelt += 1
            symbols |= tokenizer.unknown(text)
    if unspelt:
        shown = " ".join(repr(symbol) for symbol in sorted(symbols)[:10])
        fate = "are skipped" if name == "train" else "count as errors"
        found = f"{unspelt} of {len(rows)} transcripts cannot be spelled ({shown}) and {fate}"
        yield Finding(AMBER, f"text {name}", f"{found}; {fix}")
    else:
        found = f"all of {len(rows)} transcripts can be spelled"
        yield Finding(GREEN, f"text {name}", found)
    encoder = getattr(task, "encoder", None)
    line = crowded(index, rows, tokenizer, encoder.frames, sample_rate) if encoder else ""
    if line:
        yield Finding(AMBER, f"lengths {name}", line)


def shapes_of(config: DictConfig, data: DataModule, task: Task) -> Finding:
    """The finding on training shapes: the fixed ones with their predicted memory, or that they vary."""
    shapes, footprint = data.shapes(), task.footprint()
    if not shapes:
        return Finding(GREEN, "shapes", "vary with the recordings (data.shapes=N fixes them)")
    rate = int(config.data.get("sample_rate") or 16_000)
    told = [
        f"{rows} × {samples / rate:.1f} s × {labels}"
        + (f" {size / 2**20:,.0f} MiB" if (size := footprint.bytes(rows, samples / rate, labels)) else "")
        for rows, samples, labels in shapes
    ]
    more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    return Finding(GREEN, "shapes", f"rows × length × labels, with memory: {', '.join(told[:_SHOWN])}{more}")


main = console(run)

if __name__ == "__main__":
    main()
