"""Locations in a module as the user knows them: the model's own call stack, with paths that all machines have."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxlib.mlir import ir

from stagec.core.builds import extensions


def rewrite(module: ir.Module, roots: Sequence[str]) -> None:
    """Leave stagec's own frames out of the locations of `module`, and make file names relative.

    roots: import roots; names are relative to the first that has the file, or to the folder of installed packages.
    """
    displayed = functools.cache(lambda filename: _displayed(filename, roots))
    known: dict[ir.Attribute, ir.Location] = {}

    def mapped(location: ir.Location) -> ir.Location:
        attribute = location.attr
        if attribute not in known:
            known[attribute] = convert(location)
        return known[attribute]

    def convert(location: ir.Location) -> ir.Location:
        """Return a location without stagec's frames; the unknown location if no frame is left."""
        match location:
            case ir.FileLineColLoc():
                if location.filename.startswith(extensions.sources()):
                    return ir.Location.unknown()
                ends = (location.start_line, location.start_col, location.end_line, location.end_col)
                return ir.Location.file(displayed(location.filename), *ends)
            case ir.NameLoc():
                child = mapped(location.child_loc)
                gone = _is_unknown(child) and not _is_unknown(location.child_loc)
                # The name is the frame's if its child is a line, and the operation's otherwise.
                frame = isinstance(location.child_loc, ir.FileLineColLoc)
                return child if gone and frame else ir.Location.name(location.name_str, child)
            case ir.CallSiteLoc():
                callee, caller = mapped(location.callee), mapped(location.caller)
                if _is_unknown(callee) or _is_unknown(caller):
                    return caller if _is_unknown(callee) else callee
                return ir.Location.callsite(callee, [caller])
            case ir.FusedLoc():
                parts: Any = location.locations
                return ir.Location.fused([mapped(part) for part in parts])
        return location

    def visit(operation: ir.Operation) -> ir.WalkResult:
        operation.location = mapped(operation.location)
        for argument in (a for region in operation.regions for block in region.blocks for a in block.arguments):
            argument.set_location(mapped(argument.location))
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)


def _is_unknown(location: ir.Location) -> bool:
    return isinstance(location, ir.UnknownLoc)


def _displayed(filename: str, roots: Sequence[str]) -> str:
    """Return a source file's path in a form that is the same on every machine."""
    _, installed, inside = filename.rpartition("site-packages/")
    if installed:
        return installed + inside
    path = Path(filename).absolute()
    for root in roots:
        if path.is_relative_to(Path(root).absolute()):
            return str(path.relative_to(Path(root).absolute()))
    return path.name
