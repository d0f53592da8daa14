"""speechtrain doctor: checks whether this machine, and a given recipe, can train."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING

from speechtrain.commands._cli import Parser, console
from speechtrain.errors import ConfigError, MachineError, SpeechtrainError, Terminal, one_line
from speechtrain.files import absolute_path
from speechtrain.overrides import key_of_override
from speechtrain.start.choices import choices
from speechtrain.start.targets import described_error

if TYPE_CHECKING:
    from speechtrain.data.base import DataModule
    from speechtrain.devices.base import Device, DeviceFacts
    from speechtrain.precision import Precision
    from speechtrain.start.run_config import RunConfig
    from speechtrain.task import Task

GREEN, AMBER, RED = "green", "amber", "red"
"""States of a finding: fine, works with a drawback, does not work."""
_COLOURS = {GREEN: "\033[32m", AMBER: "\033[33m", RED: "\033[31m"}  # escape sequences of the terminal
_END_OF_COLOUR = "\033[0m"
_MAX_SHAPES = 8  # shapes that the finding on shapes lists


def parser() -> Parser:
    parser = Parser(
        prog="speechtrain doctor",
        description="Check this machine, and a recipe on it. The doctor takes the arguments of a "
        "training, and checks the defaults without arguments. It prints a line for each check: green "
        "(fine), amber (works, with a drawback), red (does not work, and how to fix it). The last lines are "
        "about the recipe: its config, launcher, model, recordings and transcripts, its shapes with their "
        "predicted memory, and one training step of its largest batch. For an absent accelerator, all lines "
        "appear except those of the step. The doctor writes no file except the data cache, which training "
        "would also write (SPEECHTRAIN_CACHE).",
        examples=["speechtrain doctor", "speechtrain doctor recipe=mlperf device=hpu"],
        exit_codes="0 if no line is red, otherwise the code of the first red line: 2 config, 3 data, 4 "
        "machine or training step",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="also GROUP=CHOICE: the recipe")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="your own choices of the groups")
    return parser


@dataclass(frozen=True)
class Finding:
    """The outcome of one check, which is printed as one line."""

    state: str  # GREEN, AMBER or RED
    subject: str  # the first words of the line
    text: str  # the facts, and the fix if one is needed
    exit_code: int = MachineError.exit_code  # the command's exit code if this is the first red finding


def run(argv: list[str]) -> int:
    """Print every finding. Return the exit code of the first red finding, or 0 if none is red."""
    arguments = parser().parse_intermixed_args(argv)
    folder = arguments.config_dir
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"--config-dir {folder}: it is not a folder")
    if arguments.overrides and all(map(_names_run, arguments.overrides)):
        raise ConfigError("the doctor checks a recipe and no run. Name its keys, such as recipe=demo")
    from speechtrain.start.on_host import restart_for

    # If the device's libraries need environment variables that are not set, a new process replaces this one.
    # An error of the config or the device is ignored here, because a later check reports it.
    with contextlib.suppress(SpeechtrainError):
        restart_for(_device_of(arguments.overrides, folder), is_training=True)
    code = 0
    for finding in findings(arguments.overrides, folder):
        _print_finding(finding)
        if finding.state == RED and not code:
            code = finding.exit_code
    return code


def _names_run(argument: str) -> bool:
    """Return whether an argument names a run: it is ``run_dir=RUN``, or a word without = and ~."""
    is_override = "=" in argument or "~" in argument
    return not is_override or key_of_override(argument) == "run_dir"


def _device_of(overrides: list[str], config_dir: str | None) -> Device:
    from speechtrain.start.compose import compose
    from speechtrain.start.run_config import part_of

    device: Device = part_of(compose(overrides, config_dir), "device").build()
    return device


def _print_finding(finding: Finding) -> None:
    state = f"{finding.state:<5}"
    stream = sys.stdout
    if stream.isatty():
        state = f"{_COLOURS[finding.state]}{state}{_END_OF_COLOUR}"
    if isinstance(stream, Terminal):  # It would escape the colours.
        stream = stream.rich_proxied_file
    print(state, end="", file=stream)
    print(f"  {finding.subject:<13} {finding.text}", flush=True)


def findings(overrides: list[str], config_dir: str | None) -> Iterator[Finding]:
    """Yield the findings of all checks, the cheapest check first."""
    yield from machine_findings()
    yield from package_findings()
    with tempfile.TemporaryDirectory(prefix="speechtrain-doctor-") as run_dir:
        yield from recipe_findings(overrides, config_dir, run_dir)


def try_check(subject: str, check: Callable[[], str]) -> Finding:
    """Return a green finding with the text of ``check``, or a red one with the error that it raises."""
    try:
        return Finding(GREEN, subject, check())
    except Exception as error:  # The doctor reports every error as a finding.
        return failure(subject, error)


def failure(subject: str, error: Exception) -> Finding:
    """Return the red finding on an error."""
    if isinstance(error, SpeechtrainError):
        return Finding(RED, subject, one_line(str(error)), exit_code=error.exit_code)
    return Finding(RED, subject, one_line(described_error(error))[:300])


def _green_or_amber(is_fine: bool) -> str:
    return GREEN if is_fine else AMBER


def machine_findings() -> Iterator[Finding]:
    """Yield findings on Python, the installation, cores, memory, network links, disk and cache."""
    yield Finding(GREEN, "python", platform.python_version())
    yield installation_finding()
    import psutil

    from speechtrain.compute_policy import usable_cpus

    yield Finding(GREEN, "cores", f"{len(usable_cpus())} usable of {os.cpu_count()} ({platform.machine()})")
    memory = psutil.virtual_memory().available / 2**30
    yield Finding(_green_or_amber(memory >= 2), "memory", f"{memory:.1f} GiB available")
    from speechtrain.devices import links

    are_links_up, line = links.describe_links(links.interfaces(), links.cards())
    yield Finding(_green_or_amber(are_links_up), "links", line)
    yield _space_finding("disk", Path(os.environ.get("OUTPUT_DIR") or "runs"), "OUTPUT_DIR")
    from speechtrain.data.cache import cache_folder

    yield _space_finding("cache", cache_folder(), "SPEECHTRAIN_CACHE")


def _space_finding(subject: str, path: Path, variable: str) -> Finding:
    """Return the finding on whether ``path``, or its nearest existing parent, is writable and has space.

    ``variable`` is the environment variable that sets the path.
    """
    absolute = absolute_path(path)
    folder = next(parent for parent in (absolute, *absolute.parents) if parent.is_dir())
    if not os.access(folder, os.W_OK):
        return Finding(RED, subject, f"{folder} is not writable. Set {variable} to a folder that is")
    free_gib = shutil.disk_usage(folder).free / 2**30
    text = f"{free_gib:.1f} GiB free at {folder}"
    if free_gib >= 5:
        return Finding(GREEN, subject, text)
    state = AMBER if free_gib >= 0.25 else RED
    return Finding(state, subject, f"{text}. Set {variable} to a larger disk")


def installation_finding() -> Finding:
    """Return the finding on whether the package and its YAML files belong to the same installation.

    Both are found by ``sys.path``. An installed copy and a checkout may each provide one of them.
    """
    package = Path(import_module("speechtrain").__path__[0])
    choices_folder = Path(import_module("speechtrain.conf").__path__[0])
    text = f"{package}, choices in {choices_folder}"
    # The folder is in an installed package, and beside the package of a checkout.
    if choices_folder.parent in (package, package.parent):
        return Finding(GREEN, "speechtrain", text)
    return Finding(AMBER, "speechtrain", f"{text}, remove one installation or PYTHONPATH")


def package_findings() -> Iterator[Finding]:
    """Yield findings on the libraries, and on the devices that torch can use."""
    for name in ("torch", "hydra-core", "lhotse", "soundfile", "sentencepiece", "safetensors", "tensorboard"):
        try:
            yield Finding(GREEN, name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(RED, name, f"is not installed. Run pip install {name}")
    # bitsandbytes is optional. If a recipe needs it and it is missing, the finding on the optimizer says so.
    with contextlib.suppress(metadata.PackageNotFoundError):
        yield Finding(GREEN, "bitsandbytes", metadata.version("bitsandbytes"))
    import torch

    from speechtrain.devices.cpu import has_bf16
    from speechtrain.start.auto_device import auto_device

    yield devices_finding()
    capability = torch.backends.cpu.get_cpu_capability()
    text = f"{capability}, {torch.get_num_threads()} threads, precision=fp32 or bf16"
    yield Finding(GREEN, "device=cpu", text)
    yield Finding(GREEN, "device=auto", str(auto_device()))
    if not has_bf16():
        yield Finding(AMBER, "bf16", "this chip has no bf16 instructions, so precision=bf16 trains in fp32")
    try:
        import soundfile
    except Exception as error:  # The doctor reports every error as a finding.
        yield failure("audio", error)
    else:
        yield Finding(GREEN, "audio", f"libsndfile {soundfile.__libsndfile_version__}")


def devices_finding() -> Finding:
    """Return the finding on devices: the usable ones with their precisions, and why others are not usable."""
    from speechtrain.precision import NAMES

    usable, absent = [], []
    for choice in choices(None)["device"]:
        device = _device_of([f"device={choice}"], None)
        absence = device.absence(1)
        if absence:
            # A message is a cause and a fix. This line has no room for the fixes of all absent devices.
            cause = re.split("[;.] ", one_line(absence))[0]
            absent.append(cause.removeprefix("device="))
        else:
            precisions = [name for dtype, name in NAMES.items() if device.supports(dtype)]
            usable.append(f"{choice} ({' '.join(precisions)})")
    text = ", ".join(usable)
    if absent:
        text += f". Not available: {', '.join(absent)}"
    return Finding(GREEN, "devices", text)


def recipe_findings(overrides: list[str], config_dir: str | None, run_dir: str) -> Iterator[Finding]:
    """Yield findings on a recipe's config, launcher, device, model, data, and one training step.

    If a part cannot be built, its finding is the last, except in two cases:

    - The device cannot be opened. Only the findings on the training step, which needs it, are missing then.
    - The optimizer cannot be built. All other findings follow.
    """
    from speechtrain.rank.batch_memory import free_batch_memory
    from speechtrain.rank.build import build_task
    from speechtrain.start.auto_memory import is_batch_memory_open, with_batch_memory
    from speechtrain.start.build import build_data
    from speechtrain.start.job import config_of_new_run
    from speechtrain.start.run_config import run_config

    subject = "recipe"  # of the finding on an error
    try:
        composed = config_of_new_run(overrides, config_dir, run_dir)
        run = run_config(composed.config)
        facts = [f"{' '.join(overrides) or 'the defaults'}: every key is valid", *composed.notices]
        yield Finding(GREEN, subject, ". ".join(facts))

        subject = "launcher"
        launcher = run.launcher.build()
        missing_program = launcher.missing_program()
        if missing_program:
            yield Finding(AMBER, subject, missing_program)
        else:
            text = f"{launcher.choice}, ranks: {run.world_size}, hosts: {launcher.host_count()}"
            yield Finding(GREEN, subject, text)

        subject = "device"
        device = run.device.build()
        yield from _vendor_findings(run, device)
        precision, device_finding = _open(run, device)
        yield device_finding

        subject = "model"
        task, tokenizer = build_task(run)
        parameters = sum(parameter.numel() for parameter in task.parameters())
        yield Finding(GREEN, subject, f"{parameters:,} parameters, {tokenizer.size} classes with the blank")
        yield try_check("optimizer", lambda: _describe_optimizer(run, task, parameters))

        subject = "data"
        if is_batch_memory_open(run):
            run = with_batch_memory(run, free_batch_memory(run, device, task))
        with contextlib.closing(build_data(run, tokenizer, task)) as data:
            yield from _data_findings(data, device, task)
            yield try_check("parts", lambda: _check_contracts(run, data, task))
            if precision is not None:
                yield from _step_findings(run, device, precision, task, data)
    except Exception as error:  # The doctor reports every error as a finding.
        yield failure(subject, error)


def _open(run: RunConfig, device: Device) -> tuple[Precision | None, Finding]:
    """Open the device. Return the precision, or None if the device cannot be opened, and the finding.

    An accelerator that this machine does not have is amber, because the recipe may be for another machine.
    An accelerator whose library cannot work here is red, as every other fault.
    """
    from speechtrain.rank.build import open_device

    try:
        device.check(1)
        precision = open_device(device, run.precision.build())
    except Exception as error:  # The doctor reports every error as a finding.
        finding = failure("device", error)
        is_absent = device.absence(1) and not device.library_fault()
        if is_absent and not device.on_host:
            finding = replace(finding, state=AMBER)
        return None, finding
    return precision, Finding(GREEN, "device", f"{type(device).__name__}, precision={precision.name}")


def _describe_optimizer(run: RunConfig, task: Task, parameters: int) -> str:
    """Return the optimizer's class, and the memory of a rank that does not depend on the batch."""
    from speechtrain.start.build import build_optimizer, bytes_per_weight

    optimizer = build_optimizer(run, task.parameter_groups())
    gib = bytes_per_weight(run) * parameters / 2**30
    return (
        f"{type(optimizer).__name__}, weights, gradients, state and average take {gib:.2f} GiB of each rank"
    )


def _data_findings(data: DataModule, device: Device, task: Task) -> Iterator[Finding]:
    """Yield findings on recordings, shapes, transcripts, and labels per encoder frame."""
    data.check()
    text = f"{data.micro_batches_per_epoch} micro-batches an epoch"
    shapes = data.shapes()
    if shapes:
        text += f", {len(shapes)} fixed shapes"
    text += ", recordings are in place"
    if data.valid():
        yield Finding(GREEN, "data", text)
    else:
        yield Finding(AMBER, "data", f"{text}, no evaluation set")
    for warning in data.warnings():
        yield Finding(AMBER, "data", warning)
    yield try_check("shapes", lambda: _describe_shapes(data, device, task))
    encoder = getattr(task, "encoder", None)
    crowded_transcripts = data.crowded_transcripts(encoder.frames) if encoder else ""
    if crowded_transcripts:
        yield Finding(AMBER, "data", crowded_transcripts)


def _describe_shapes(data: DataModule, device: Device, task: Task) -> str:
    """Return the fixed shapes of training batches and their predicted memory, or that shapes vary.

    Raises ConfigError if the device needs fixed shapes and the shapes of the data vary.
    """
    shapes = data.shapes()
    device.validate_shapes(shapes)
    if not shapes:
        return "vary with the recordings (data.shapes=N fixes them)"
    footprint = task.footprint()
    texts = []
    for rows, samples, labels in shapes[:_MAX_SHAPES]:
        seconds = samples / task.sample_rate
        text = f"{rows} × {seconds:.1f} s × {labels}"
        size = footprint.bytes(rows, seconds, labels)
        if size:
            text += f" {size / 2**20:,.0f} MiB"
        texts.append(text)
    line = f"rows × length × labels, with memory: {', '.join(texts)}"
    if len(shapes) > _MAX_SHAPES:
        line += f" and {len(shapes) - _MAX_SHAPES} more"
    return line


def _check_contracts(run: RunConfig, data: DataModule, task: Task) -> str:
    """Return a line. Raises ConfigError with the class of a part that breaks its contract."""
    from speechtrain.rank.contract import check_contract

    check_contract(task, data, lambda batch: batch, run.world_size)
    return "lengths, losses and metrics of two recordings keep their contracts"


def _step_findings(
    run: RunConfig, device: Device, precision: Precision, task: Task, data: DataModule
) -> Iterator[Finding]:
    """Yield findings on a training step of the largest batch, and on the time of an epoch."""
    import torch

    from speechtrain.rank.trial_steps import TrialSteps

    try:
        task.to(device.tensor(torch.zeros(())).device)
        steps = TrialSteps(run, data, task, device, precision)
        yield Finding(GREEN, "one step", steps.describe_largest_step(data, task.sample_rate))
    except Exception as error:  # The doctor reports every error as a finding.
        yield failure("one step", error)
        return
    yield try_check("epoch", lambda: steps.predict_epoch(data, run.world_size))


def _vendor_findings(run: RunConfig, device: Device) -> Iterator[Finding]:
    """Yield findings on the vendor's library, on the release of its plugin, and on the memory of the host.

    A fault of the library is one that the device reports. The other two need a value in ``facts``. The CPU
    and CUDA have neither faults nor values, so they get no finding.
    """
    fault = device.library_fault()
    if fault:
        yield Finding(RED, "torch", fault)
    with contextlib.suppress(metadata.PackageNotFoundError):
        if device.facts.plugin:
            yield _plugin_finding(device.facts, metadata.version(device.facts.plugin))
    if device.facts.host_gib:
        yield _host_memory_finding(run, device)


def _plugin_finding(facts: DeviceFacts, version: str) -> Finding:
    """Return the finding on the release of the vendor's plugin."""
    plugin = f"{facts.plugin} {version}"
    for release, torch_version in facts.plugin_torch.items():
        if f"{version}.".startswith(f"{release}."):
            return Finding(GREEN, "release", f"{plugin} is built for torch {torch_version}")
    return Finding(AMBER, "release", f"{plugin} is not in the table of docs/devices.md")


def _host_memory_finding(run: RunConfig, device: Device) -> Finding:
    """Return the finding on host memory, for a device whose vendor specifies it for each card."""
    import psutil

    processes = math.ceil(run.world_size / run.launcher.build().host_count())
    needed_gib = device.facts.host_gib * processes
    total_gib = psutil.virtual_memory().total / 2**30
    line = f"{total_gib:.0f} GiB. The vendor's recipe for {processes} cards asks for {needed_gib} GiB a host"
    return Finding(_green_or_amber(total_gib >= needed_gib), "host memory", line)


main = console(run)

if __name__ == "__main__":
    main()
