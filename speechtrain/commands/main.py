"""The program ``speechtrain``, whose first argument is the name of a command. Its --help imports no torch."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from speechtrain import __version__
from speechtrain.commands._cli import console
from speechtrain.errors import ConfigError, nearest
from speechtrain.start.command_line import without_local_rank

COMMANDS = {
    "train": "train a model, continue a run, or run a sweep",
    "prepare": "tokenizers, manifests, statistics and public corpora",
    "evaluate": "score a run on evaluation sets",
    "transcribe": "transcribe recordings with a run",
    "export": "convert a run to the format of another system, and its models to runs",
    "report": "write an HTML page of one run or of several",
    "study": "search for the values of keys that train best: ask, tell, status, import",
    "doctor": "check whether this machine and a recipe can train",
}
"""Each command with its description in ``speechtrain --help``."""


def run(argv: list[str]) -> int:
    """Run the command that the first argument names, and return its exit code.

    Raises ConfigError for an unknown name.
    """
    # torch.distributed.launch adds its option before the name of the command.
    argv = without_local_rank(argv)
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"speechtrain {__version__}")
        return 0
    if not name:
        print(_help(), file=sys.stderr)
        return ConfigError.exit_code
    if name in ("-sc", "--shell-completion"):
        return _complete(argv)
    if name not in COMMANDS:
        kind = "option" if name[0] == "-" else "command"
        hint = nearest(name, (*COMMANDS, "--help", "--version"))
        raise ConfigError(f"unknown {kind} {name}{hint}; speechtrain --help shows the usage")
    # Hydra installs its shell completion for the name of the process, so the name must include the command.
    if without_local_rank(sys.argv[1:]) == argv:
        sys.argv = [f"speechtrain-{name}", *argv[1:]]
    return int(import_module(f"speechtrain.commands.{name}").run(argv[1:]))


def _complete(argv: list[str]) -> int:
    """Print the completions of the shell's line. Hydra completes the arguments of ``speechtrain train``."""
    words = os.environ.get("COMP_LINE", "").split(" ")
    if "train" in words[1:-1] or "query=bash" not in argv:
        sys.argv = ["speechtrain-train", *argv]  # the program for which Hydra installs the completion
        return int(import_module("speechtrain.commands.train").run(argv))
    if len(words) < 3:
        print(" ".join(name for name in COMMANDS if name.startswith(words[-1])))
    return 0


def _help() -> str:
    lines = ["usage: speechtrain COMMAND ...", "", "Train and use speech models.", "", "commands:"]
    for name, description in COMMANDS.items():
        lines.append(f"  {name:<12} {description}")
    lines += ["", "options:", "  -h, --help   show this help, or the help of a command behind its name"]
    lines += ["  --version    print the version", "", "examples:", "  speechtrain train recipe=demo"]
    lines += ["  speechtrain transcribe RUN talk.mp3", "  speechtrain evaluate --help"]
    return "\n".join(lines)


main = console(run)

if __name__ == "__main__":
    main()
