"""Where operations come from: find the operations of XLA's errors and profiles in `<name>.debug.mlir`.

XLA knows no lines of ours, for executables hold none. It names an operation (`jit(f)/tanh`), an instruction that is
called after one (`%tanh.2`), an opcode or the target of a custom call; an error about memory says how much is missing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagec.core.data import child, reading
from stagec.costs.operations import SHARDINGS

if TYPE_CHECKING:
    from jaxlib.mlir import ir  # a child process reads the files of others

_NEVER_RUN = SHARDINGS | {"shape_assertion"}
"""Custom calls that are gone when a program is compiled."""


LARGEST = 1 << 28
"""Bytes of a module with source locations that are read (256 MiB)."""


@dataclass(frozen=True)
class Frame:
    """A line of a call stack; `file` is relative to the workspace, `function` is "" if it is not known."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function else "")


@dataclass(frozen=True)
class Operation:
    """An operation of a program.

    name: JAX's, such as "jit(f)/tanh"; "" if it has none.
    opcode: without its dialect, such as "dot_general".
    target: of a custom call, "" of all others.
    frames: the call stack of the line that it comes from, innermost first; empty if it is not known.
    """

    name: str
    opcode: str
    target: str
    frames: tuple[Frame, ...]


def read(text: str) -> tuple[Operation, ...]:
    """Return the operations of a module in its text form. Raises ValueError for any other string."""
    from jaxlib.mlir import ir

    from stagec.pjrt.dialects import make_context

    with make_context() as context:
        try:
            return of_module(ir.Module.parse(text, context))
        except Exception as error:  # jaxlib raises ValueError or MLIRError, by version
            raise ValueError(f"not a StableHLO module: {' '.join(str(error).split())[:200]}") from error


def of_module(module: ir.Module) -> tuple[Operation, ...]:
    """Return the operations of a module, those of a function once for each call of it, as XLA puts it there.

    In a function names and call stacks start at its call: both are put together here, as XLA does with names.
    """
    from jaxlib.mlir import ir

    functions = {
        ir.StringAttr(function.attributes["sym_name"]).value: function.operation
        for function in module.body.operations
        if function.operation.name == "func.func"
    }
    operations: list[Operation] = []
    called: set[str] = set()
    done: set[tuple[str, str, tuple[Frame, ...]]] = set()

    def expand(function: str, caller: str, stack: tuple[Frame, ...]) -> None:
        # Functions that call the next one twice would else double with each level.
        if (function, caller, stack) in done:
            return
        done.add((function, caller, stack))
        calls: list[tuple[str, str, tuple[Frame, ...]]] = []

        def visit(operation: ir.Operation) -> ir.WalkResult:
            if operation.name == "func.func":
                return ir.WalkResult.ADVANCE
            location = operation.location
            own, inner = (location.name_str, location.child_loc) if isinstance(location, ir.NameLoc) else ("", location)
            name, frames = "/".join(filter(None, (caller, own))), (*_frames(inner), *stack)
            target = ""
            if operation.name == "stablehlo.custom_call":
                target = ir.StringAttr(operation.attributes["call_target_name"]).value
            operations.append(Operation(name, operation.name.rpartition(".")[2], target, frames))
            if operation.name == "func.call":
                calls.append((ir.FlatSymbolRefAttr(operation.attributes["callee"]).value, name, frames))
            return ir.WalkResult.ADVANCE

        functions[function].walk(visit)
        for callee, name, frames in calls:
            called.add(callee)
            expand(callee, name, frames)

    # JAX writes functions after those that call them.
    for function in functions:
        if function not in called:
            expand(function, "", ())
    return tuple(operations)


def locate(text: str, operations: Iterable[Operation]) -> list[Operation]:
    """Return the operations in `text` (a name or an XLA message), equal ones once.

    The first way of speaking that fits counts: by name, by instruction, by custom call, by opcode. An error from inside
    a custom call (`[execute] ...`) says no name: all custom calls are returned.
    """
    known = list(dict.fromkeys(operations))
    instructions = {match.lower() for match in re.findall(r"%([A-Za-z_][\w-]*?)(?:\.\d+)*(?![\w.-])", text)}
    opcodes = {match.replace("-", "_") for match in re.findall(r"(?:opcode [`'\"]?|stablehlo\.)([\w-]+)", text)}
    in_a_call = re.search(r"\[(?:instantiate|prepare|initialize|execute)\]", text)

    def word(name: str) -> bool:
        return bool(re.search(rf"(?<![\w/]){re.escape(name)}(?![\w/(\[])", text))

    ways: tuple[Callable[[Operation], object], ...] = (
        lambda operation: operation.name == text.strip() or ("/" in operation.name and word(operation.name)),
        lambda operation: operation.name.rpartition("/")[2].lower() in instructions,
        lambda operation: operation.target and word(operation.target),
        lambda operation: operation.opcode in (*opcodes, text.strip()),
        lambda operation: in_a_call and operation.target not in ("", *_NEVER_RUN),
    )
    return next(filter(None, ([operation for operation in known if way(operation)] for way in ways)), [])


def find(path: Path, text: str) -> list[Operation]:
    """Return the operations in `text` from the module at `path`, like `locate`, but read it in a child process.

    Raises OSError, and ValueError when the file is not a module.
    """
    rows = child.call(located, reading.whole(path, LARGEST), text)
    return [Operation(**{**row, "frames": tuple(Frame(**frame) for frame in row["frames"])}) for row in rows]


def located(module: bytes, text: str) -> list[dict[str, Any]]:
    """Do that in this process; jaxlib may end it if the module is damaged. Return the fields of operations."""
    return [asdict(operation) for operation in locate(text, read(module.decode()))]


def largest(hlo: str) -> list[str]:
    """Return the names of the operations with the largest results in the text form of an HLO module.

    Those that are at least half as large as the largest, at most three.
    """
    sizes: dict[str, int] = {}
    # Names without a slash are those of arguments.
    pattern = r"^ .*? = (\(.*?\)|\S+) [\w-]+\(.* metadata=\{.*?op_name=\"([^\"]*/[^\"]*)\""
    for kind, name in re.findall(pattern, hlo, re.MULTILINE):
        arrays = re.findall(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]", kind)
        size = sum(int(bits or 8) * math.prod(int(n) for n in shape.split(",") if n) for _, bits, shape in arrays)
        sizes[name] = max(size, sizes.get(name, 0))
    most = max(sizes.values(), default=0)
    return sorted((name for name in sizes if 2 * sizes[name] >= most), key=lambda name: -sizes[name])[:3]


def as_text(operations: Sequence[Operation]) -> str:
    """Return the operations with their call stacks, for a person to read; "" for none. Ends with a newline."""
    lines = []
    for operation in operations:
        calls = f" (custom call {operation.target})" if operation.target else ""
        lines.append(f"{operation.name or operation.opcode}{calls}")
        lines += [f"  {frame}" for frame in operation.frames] or ["  (no source location)"]
    return "".join(f"{line}\n" for line in lines)


def add_note(error: BaseException, debug: Path, hlo: str) -> None:
    """Add to an error of XLA's the lines of the sources that it is about, as the file `debug` says.

    hlo: the program that failed, as a string; "" if there is none.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text:
        # XLA names no operation then, only a size: so those with the largest results are shown.
        text = "\n".join(largest(hlo))
    try:
        lines = as_text(find(debug, text)).rstrip()
    except (OSError, ValueError) as unreadable:
        error.add_note(f"{debug}: {unreadable}")
        return
    if lines:
        error.add_note(f"what it is about, by {debug.name}:\n{lines}")


def _frames(location: ir.Location, function: str = "") -> Iterator[Frame]:
    from jaxlib.mlir import ir

    match location:
        case ir.FileLineColLoc():
            yield Frame(location.filename, location.start_line, function)
        case ir.NameLoc():
            yield from _frames(location.child_loc, location.name_str)
        case ir.CallSiteLoc():
            yield from _frames(location.callee)
            yield from _frames(location.caller)
        case ir.FusedLoc():
            parts: Any = location.locations
            yield from next(filter(None, (tuple(_frames(part)) for part in parts)), ())
