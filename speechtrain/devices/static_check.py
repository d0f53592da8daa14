"""Checks on the CPU that a lazy device can run a training step as one cached graph.

A device that records graphs compiles each distinct graph once. A step is fit for it if the host reads
nothing back, no shape depends on data, and every shape occurred in the warm-up.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from speechtrain.errors import MachineError, SpeechtrainError

_TORCH = str(Path(torch.__file__).parent)
_ROOT = Path(__file__).parents[1]
_ENGINE = "_engine_run_backward"
_READS = "reads a value back to the host, which ends the graph"
_DYNAMIC = "gives a shape that depends on data, so every step is compiled"
_MASKS = (torch.bool, torch.uint8)
# methods that read a CPU tensor's memory without an operation that the dispatcher sees
_MEMORY = {
    getattr(Tensor, name): f"Tensor.{name}" for name in ("tolist", "numpy", "__array__", "cpu", "__dlpack__")
}


class Unfit(SpeechtrainError):
    """A step that a lazy device would not run from its cache; ``place`` is the line that causes it."""

    exit_code = MachineError.exit_code

    def __init__(self, place: SourceLine, what: str, fault: str, forward: SourceLine | None = None) -> None:
        within = f", in the backward of {forward}" if forward is not None and forward != place else ""
        code = f" ({place.code})" if place.code else ""
        super().__init__(f"{place}{code}: {what} {fault}{within}")
        self.place = place
        self.forward = forward


@dataclass(frozen=True)
class SourceLine:
    file: str
    line: int

    def __str__(self) -> str:
        path = Path(self.file)
        shown = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path
        return f"{shown}:{self.line}"

    @property
    def code(self) -> str:
        """The line's text, at most 80 characters."""
        return linecache.getline(self.file, self.line).strip()[:80]


class Guard:
    """Watches the steps that run under it in this thread, including the backward.

    ``with guard.warm_up():`` learns shapes; ``with guard:`` raises ``Unfit`` at the first operation that
    reads a value back to the host, or has an output whose shape depends on data or is new since the
    warm-up. The warm-up also raises for the first two. The line named is the innermost outside torch; for
    an operation of the backward it is the line of the forward that made it.

    A tensor made of numbers only, without ``device=``, is on the host on every device and may be read.
    Other host tensors (an optimizer's step counter) cannot be distinguished, so the guard is for forward and
    backward. Costs two Python calls for every operation.
    """

    def __init__(self) -> None:
        self._known: set[tuple[str, torch.Size, torch.dtype]] = set()
        self._places: dict[int, SourceLine] = {}  # of the operations that will have a backward
        self.on_host = WeakIdKeyDictionary()
        self._is_learning = False
        self._stack = ExitStack()

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """A context that learns the shapes of a step; later steps may have these shapes only."""
        self._is_learning = True
        try:
            with self:
                yield
        finally:
            self._is_learning = False

    def __enter__(self) -> Guard:
        self._places.clear()
        self._stack.enter_context(_Methods(self))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def blame(self, operation: str, fault: str) -> Unfit:
        """The error for the operation that runs now."""
        place, is_forward = _caller()
        node: Any = torch._C._current_autograd_node()  # None outside a backward
        if node is None:
            return Unfit(place, operation, fault)
        made = self._places.get(node._sequence_nr())
        if is_forward:  # Python code of a backward, or of a hook
            return Unfit(place, operation, fault, forward=made)
        return Unfit(made or place, f"{operation} of the backward", fault)

    def before(self, function: Any, arguments: Any) -> None:
        """Record the line that made an operation; refuse a host read or a shape that depends on data."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            # autograd numbers a node right before its operation runs, so the first number is the node's own
            number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
            if number not in self._places:
                self._places[number] = _caller()[0]
        name = function.__name__ if hasattr(function, "__name__") else str(function)
        if torch.Tag.data_dependent_output in function.tags and arguments[0] not in self.on_host:
            raise self.blame(name, _READS)
        packet = name.partition(".")[0]
        if packet in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
            if any(isinstance(t, Tensor) and t.dtype in _MASKS for t in tree_leaves(arguments[1])):
                raise self.blame(f"{name} by a mask", _DYNAMIC)
        elif torch.Tag.dynamic_output_shape in function.tags:
            raise self.blame(name, _DYNAMIC)

    def after(self, function: Any, outputs: Any) -> None:
        """Learn the shapes of an operation's outputs, or refuse new ones."""
        for output in tree_leaves(outputs):
            if not isinstance(output, Tensor):
                continue
            form = (str(function), output.shape, output.dtype)
            if self._is_learning:
                self._known.add(form)
            elif form not in self._known:
                shape = "×".join(str(size) for size in output.shape) or "()"
                raise self.blame(
                    function.__name__, f"has the new shape {shape}, which was not in the warm-up"
                )


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts every operation of forward and backward, below autograd."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.guard = guard

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.guard.before(func, args)
        outputs = func(*args, **(kwargs or {}))
        self.guard.after(func, outputs)
        return outputs


class _Methods(TorchFunctionMode):
    """Intercepts the methods that read a tensor's memory without any operation."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.guard = guard

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _MEMORY and args[0] not in self.guard.on_host:
            raise self.guard.blame(_MEMORY[func], _READS)
        output = func(*args, **(kwargs or {}))
        is_made = isinstance(output, Tensor) and "device" not in (kwargs or {})
        if is_made and not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            self.guard.on_host[output] = True
        return output


def _caller() -> tuple[SourceLine, bool]:
    """The innermost line outside torch and this file, and whether no backward runs between them."""
    frame: FrameType | None = sys._getframe(1)
    is_direct = True
    while frame is not None:
        code: CodeType = frame.f_code
        if code.co_name == _ENGINE:
            is_direct = False
        elif not code.co_filename.startswith((_TORCH, __file__, "<")):
            return SourceLine(code.co_filename, frame.f_lineno), is_direct
        frame = frame.f_back
    return SourceLine("?", 0), is_direct
