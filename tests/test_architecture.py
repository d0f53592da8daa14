"""The walls of the house, read from the source: who may import whom, and where vendors may be named."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from speechtrain.devices.base import Device
from speechtrain.start.compose import compose
from speechtrain.start.run_config import part_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "speechtrain"
SOURCES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "launchers").rglob("*.py")])

CONTRACTS = {
    *("batch", "task", "errors", "metrics", "counter_rng", "precision", "compute_policy", "files", "dtensor"),
    *("run_directory", "trainer_config", "overrides", "torch_private", "__init__"),
}
"""Root modules that every folder may import; they import one another, torch and libraries."""

MOST_ROOT_MODULES = 14

PYTHON = {"inference.loaded_run", "losses.transducer", "start.job_config"}
"""What `import speechtrain` offers; it is imported at first use."""

# A folder: what it may import of speechtrain besides itself and the contracts.
MAY_IMPORT = {
    "nn": "",
    "losses": "nn",
    "features": "nn",
    "encoders": "features nn",
    "decoding": "losses nn text",
    "text": "",
    "models": "decoding encoders losses nn text",
    "devices": "optim.optimizer_step",
    "data": "distributed.world text",
    "optim": "",
    "tracking": "",
    "distributed": "devices.base",
    "checkpoint": "distributed",
    # It knows interfaces only.
    "training": (
        "checkpoint.best_metric checkpoint.checkpointer checkpoint.fit checkpoint.state_file data.base "
        "devices.base distributed.group optim.ema optim.optimizer_step optim.schedules tracking.base"
    ),
    "interop": "checkpoint decoding.greedy encoders features models nn text",
    "export": "data decoding encoders inference models nn start text",
    "report": "tracking",
    "study": "",
    "launch": "distributed.loopback",
    "launchers": "distributed.world launch",
    "__main__": "commands.main",
    # They build the parts of a run by their interfaces. Blocks of networks are none of their business.
    "rank": (
        "checkpoint data.base data.module devices.base devices.host devices.out_of_memory "
        "distributed interop.weights launch optim.ema optim.schedules start "
        "text.vocabulary tracking training"
    ),
    # The interfaces of encoders, decoders and schedules are types of its builders.
    "start": (
        "checkpoint data decoding.base devices distributed.world encoders.base features.augment "
        "interop launch optim.schedules report study text tracking.base"
    ),
    "inference": (
        "checkpoint data decoding.base devices.base distributed.group encoders.base rank.build "
        "start text.vocabulary training"
    ),
    "commands": (
        "checkpoint data decoding.base devices export inference interop launch.launcher rank report start "
        "study text training.evaluation"
    ),
}


def axis_of(path: Path) -> str:
    if PACKAGE in path.parents:
        return path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "launchers"


def module_of(path: Path) -> str:
    if PACKAGE in path.parents:
        return ".".join(["speechtrain", *path.relative_to(PACKAGE).with_suffix("").parts])
    return f"speechtrain.launchers.{path.stem}"


@cache  # Five tests read each module.
def imports(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            # `from speechtrain.data import base` names a module, so the imported name counts too
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_layout(path: Path) -> None:
    axis = axis_of(path)
    if axis in CONTRACTS:
        allowed = CONTRACTS | (PYTHON if axis == "__init__" else set())
    else:
        assert axis in MAY_IMPORT, f"{axis} is new: say in MAY_IMPORT what it may import"
        allowed = {*MAY_IMPORT[axis].split(), axis} | CONTRACTS
    for line, name in imports(path):
        if not name.startswith("speechtrain."):
            continue
        target = name.removeprefix("speechtrain.")
        assert any(target == a or target.startswith((a + ".", "__version__")) for a in allowed), (
            f"{path.relative_to(ROOT)}:{line} imports {name}; {axis} may import {sorted(allowed)}"
        )


def test_the_root_is_a_list_of_contracts() -> None:
    root = {path.stem for path in PACKAGE.glob("*.py")}
    root.remove("__main__")  # It holds the call of the program for ``python -m speechtrain`` only.
    assert root == CONTRACTS
    assert len(root) <= MOST_ROOT_MODULES


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Some nodes of a graph that lie on a cycle; none where there is no cycle."""
    waiting = {node: set(targets) for node, targets in graph.items()}
    while free := [node for node, targets in waiting.items() if not targets]:
        waiting = {node: targets - set(free) for node, targets in waiting.items() if node not in free}
    return sorted(waiting)


def test_no_module_and_no_folder_imports_itself_in_a_circle() -> None:
    modules = {module_of(path): path for path in SOURCES if path.name != "__init__.py"}
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for _, target in imports(path):
            graph[name] |= {found for found in (target, target.rpartition(".")[0]) if found in modules}
    assert not cycle(graph)
    folders: dict[str, set[str]] = {axis_of(path): set() for path in modules.values()}
    for name, targets in graph.items():
        own = axis_of(modules[name])
        folders[own] |= {axis_of(modules[target]) for target in targets} - {own}
    assert not cycle(folders)
    assert cycle({"a": {"b"}, "b": {"a"}, "c": {"a"}})  # this test can fail


def test_nothing_imports_a_program() -> None:
    """``commands/`` holds programs, ``prepare_*`` with their subcommands, and ``_*`` with what they share.

    ``__main__`` starts the first of them.
    """
    importers = set()
    for path in SOURCES:
        if axis_of(path) in ("commands", "__main__"):
            continue
        for line, name in imports(path):
            if name.startswith("speechtrain.commands"):
                importers.add(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not importers


def test_a_program_imports_no_other_program() -> None:
    """Only ``prepare`` imports the programs of its subcommands."""
    importers = set()
    for path in (PACKAGE / "commands").glob("*.py"):
        for line, name in imports(path):
            if re.match(r"speechtrain\.commands\.(?!_|prepare_)", name):
                importers.add(f"{path.name}:{line} imports {name}")
    assert not importers


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_hydra_stays_at_the_door(path: Path) -> None:
    if axis_of(path) in ("start", "study"):
        return
    named = [name for _, name in imports(path) if name.split(".")[0] in ("hydra", "omegaconf")]
    assert not named, f"{path.relative_to(ROOT)} imports {named}; classes never meet the config"


@pytest.mark.parametrize(
    "choice", sorted(path.stem for path in (ROOT / "conf" / "device").glob("[!_]*.yaml"))
)
def test_a_vendor_is_named_in_one_file(choice: str) -> None:
    device: Device = part_of(compose([f"device={choice}"], None), "device").build()
    for pattern in device.facts.packages:
        named = {p for p in SOURCES if re.search(pattern, p.read_text())}
        assert named <= {Path(inspect.getfile(type(device))), PACKAGE / "torch_private.py"}


def test_only_devices_and_the_policy_ask_for_the_chip() -> None:
    asks = re.compile(r"is_cpu|get_autocast|is_autocast_enabled|platform\.processor")
    named = {p.relative_to(PACKAGE) for p in SOURCES if PACKAGE in p.parents and asks.search(p.read_text())}
    assert {path.parts[0] for path in named} <= {"devices", "compute_policy.py"}


def test_the_trainer_and_the_networks_do_not_ask_for_static_shapes() -> None:
    """The device brings its update and its warm-up, and the policy computes what its shapes require."""
    asks = re.compile(r"static_shapes|lstm_segment|is_lazy|BranchFreeUpdate|isinstance\(.*Device\)")
    files = [
        PACKAGE / "training" / "trainer.py",
        *(PACKAGE / "models").rglob("*.py"),
        *(PACKAGE / "encoders").rglob("*.py"),
    ]
    assert [path.name for path in files if asks.search(path.read_text())] == []


MAY_COMPARE_NAMES = {
    "text/huggingface.py": "a panic of Rust code, whose class cannot be imported",
    "training/autotune.py": "a stored choice, which is of another device",
}
_NAME = re.compile(
    r"\['_target_'\]|(get|pop)\('_target_'|\._target_|\.__(qual)?name__|\b(device|launcher)\.(name|type|choice)\b"
)
_TEXT_TESTS = ("startswith", "endswith", "match", "fullmatch", "search")


def compares_a_name(node: ast.AST) -> bool:
    """Whether code compares the name of a class, a device or a launcher. The object should answer."""
    is_text_test = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _TEXT_TESTS
    if not is_text_test and not isinstance(node, ast.Compare | ast.Match):
        return False
    subject = node.subject if isinstance(node, ast.Match) else node
    return _NAME.search(ast.unparse(subject)) is not None


@pytest.mark.parametrize(
    ("line", "is_seen"),
    [
        ('x = config.device._target_.rpartition(".")[2] in ("CPU", "IPEX")', True),
        ('if train.get("_target_") == _EXAMPLE: pass', True),
        ('x = type(kind).__name__ == "Audio"', True),
        ('x = re.fullmatch("CPU|IPEX", type(device).__name__)', True),
        ('match device.name:\n    case "cpu": pass', True),
        ("x = parameter.device == tensor.device", False),
        ('if "_target_" in node: pass', False),
        ('raise ValueError(f"{type(x).__name__} is too long")', False),
    ],
)
def test_a_compared_name_is_seen(line: str, is_seen: bool) -> None:
    assert any(map(compares_a_name, ast.walk(ast.parse(line)))) is is_seen


def test_nobody_asks_which_class_or_device_it_is() -> None:
    comparing = {path for path in SOURCES if any(map(compares_a_name, ast.walk(ast.parse(path.read_text()))))}
    assert {path.relative_to(PACKAGE).as_posix() for path in comparing} == set(MAY_COMPARE_NAMES)


def test_launchers_are_named_by_target_only() -> None:
    named = [str(p) for p in SOURCES for _, name in imports(p) if name.startswith("speechtrain.launchers")]
    assert not named


_TOUCHES = re.compile(
    r"(read|write)_(text|bytes)|touch|json\.load|np\.(load|save|memmap|fromfile)|tofile|torch\.save|save_file"
    r"|export_chrome_trace|SummaryWriter|OmegaConf\.(load|save)|gettempdir|mktemp|FileHandler"
)
_MODE = re.compile(r"[rwax]b?\+?b?")
_CHECKED = ("temporary", "str(temporary)")
"""What ``atomic`` yields, a file that was made for this write."""
TOUCH_FILES = {
    "data/index.py": "the cache below the user's own home",
    "data/corpora/connected.py": "a new file of the corpus",
    "data/formats/manifests.py": "manifests that the user names",
    "interop/weights.py": "a model that the user names, and a new folder",
    "checkpoint/state_file.py": "a new folder",
    "tracking/tensorboard.py": "event files, which carry the time in their names",
    "launch/process_tree.py": "/proc",
    "devices/preload.py": "/proc, and libraries",
    "devices/cpu.py": "/proc",
    "devices/affinity.py": "/sys",
    "start/user_yaml.py": "the user's own YAML files",
    "commands/transcribe.py": "--list FILE, the user's choice",
    "commands/report.py": "--out FILE, the user's choice",
    "commands/_cli.py": "a new temporary file",
    "launchers/kubernetes.py": "a template of the package",
    "launchers/slurm.py": "a template of the package, and the log, which is checked before",
    "export/greedy_search.py": "its own folder, in a Python without speechtrain",
    "export/recording.py": "a recording that the user names, in a Python without speechtrain",
    "export/recognise_sherpa.py": "its own folder, in a Python without speechtrain",
    "files.py": "the door",
}
"""Modules that open files by another way than ``speechtrain.files``: which files."""


def opens_a_file(call: ast.Call) -> bool:
    """Whether a call reads or writes a file by name, without the checks of ``speechtrain.files``."""
    called, given = ast.unparse(call.func), [ast.unparse(argument) for argument in call.args]
    name, place = called.rpartition(".")[2], called.rpartition(".")[0]
    if place in _CHECKED or any(argument in _CHECKED for argument in given):
        return False
    if name == "open" and place not in ("device", "os", "self", "super()"):
        modes = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        return not call.args or any(map(_MODE.fullmatch, modes)) or called == "open"
    is_method = bool(place) and name in ("read_text", "read_bytes", "write_text", "write_bytes", "touch")
    return is_method or bool(_TOUCHES.fullmatch(called) and not re.match("(read|write)_", called))


def test_files_are_opened_at_one_door() -> None:
    found = {
        str(path.relative_to(PACKAGE if PACKAGE in path.parents else ROOT))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and opens_a_file(node)
    }
    assert found == set(TOUCH_FILES)


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        *[(text, True) for text in ("p.read_text()", "Path(a).write_bytes(b)", "open(p)", "p.open()")],
        *[
            (text, True)
            for text in ("(a / 'b').open('a')", "json.load(f)", "torch.save(x, path)", "p.touch()")
        ],
        *[(text, False) for text in ("read_text(p)", "temporary.write_text(t)", "device.open(0)")],
        *[(text, False) for text in ("torch.save(x, temporary)", "temporary.open('wb')", "os.open(p, 0)")],
    ],
)
def test_what_opens_a_file(text: str, is_found: bool) -> None:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert opens_a_file(call) is is_found


PARSERS = re.compile(
    r"read_json|json_lines|log_lines|parse_json|yaml_text|small_yaml|json\.loads?|yaml\.(safe_)?load|OmegaConf\.load"
)
RUN_FILES = re.compile(
    r"\b(CONFIG|RESULT|ABOUT|DEVICE|METRICS|SKIPPED|CHECKPOINT|BEST)\b"
    r"|/(config\.yaml|(run|device|result|checkpoint|best)\.json|metrics\.jsonl)\b"
)


def parsing_calls(path: Path) -> list[str]:
    """The source of each call that parses JSON or YAML."""
    calls = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and PARSERS.fullmatch(ast.unparse(node.func)):
            calls.append(ast.unparse(node))
    return calls


def reads_a_file_of_a_run(call: str) -> bool:
    return RUN_FILES.search(call.replace("'", "/")) is not None


def test_only_the_door_parses_a_file_of_a_run() -> None:
    for path in SOURCES:
        if path != PACKAGE / "run_directory.py":
            assert not any(map(reads_a_file_of_a_run, parsing_calls(path))), path


def test_only_the_door_writes_a_result() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "write_json":
                is_result = "RESULT" in ast.unparse(node) or "result.json" in ast.unparse(node)
                assert not is_result or path.name == "run_directory.py", f"{path}:{node.lineno}"


def test_a_call_that_parses_a_file_of_a_run_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("read_json(run_dir / RESULT)\njson.loads(read_text(run / 'run.json'))\nyaml_text(path)\n")
    calls = parsing_calls(path)
    assert list(map(reads_a_file_of_a_run, calls)) == [True, True, False]


TESTS = sorted((ROOT / "tests").rglob("*.py"))


def imported_test_modules(text: str) -> set[str]:
    """The modules ``test_*`` that a source imports. Code in a string counts, since a child runs it."""
    lines = re.findall(r"^[ \t'\"A-Z=]*((?:from|import) .*)$", text, flags=re.MULTILINE)
    return set(re.findall(r"\btest_\w+", "\n".join(lines)))


def test_a_test_module_is_imported_by_its_own_children_only() -> None:
    """The helpers that several test modules use are in tests/support/."""
    assert imported_test_modules("from ..unit import test_a") == {"test_a"}
    assert imported_test_modules("CODE = 'import test_b'") == {"test_b"}
    importers = {}
    for path in TESTS:
        modules = imported_test_modules(path.read_text()) - {path.stem}
        if modules and path != Path(__file__):
            importers[path.relative_to(ROOT).as_posix()] = modules
    assert not importers


def test_conf_lives_at_the_top_only() -> None:
    assert not (PACKAGE / "conf").exists(), "speechtrain/conf would shadow the mapped package"
    assert (ROOT / "conf" / "__init__.py").exists()


def test_no_folder_pickles_are_loaded() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "torch.load",
                "pickle.load",
                "pickle.loads",
            ):
                keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert keywords.get("weights_only") == "True", f"{path}:{node.lineno}"
