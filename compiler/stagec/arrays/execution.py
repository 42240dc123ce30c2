"""Arrays outside of a trace, and how operations run on them at once.

An operation is a program of one equation. It is compiled for what is known of its operands, and kept. Data that only
moves (an array made of NumPy's, an element that is read) needs no program: a CPU's buffers are memory of this process.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from stagec.arrays.lowering import Lowering, main_function, tensor_type
from stagec.arrays.program import Equation, Primitive, Program, Variable, has_programs
from stagec.arrays.tracing import LeakedTracer, Tracer
from stagec.arrays.values import Literal, ShapedArray, Value
from stagec.pjrt import arrays, clients, custom_calls, turns
from stagec.pjrt.executable import Executable


class Array(arrays.Array, Value):
    """An array with elements, on a device: what functions of `stagec.numpy` give outside of a trace.

    NumPy takes it (`numpy.asarray`), and so does whatever reads DLPack. It has the methods of the standard's array
    object (https://data-apis.org/array-api/2024.12/API_specification/array_object.html).
    """

    __slots__ = ()

    @staticmethod
    def of(found: arrays.Array) -> Array:
        """Return an array of the loader's as one with operators."""
        return Array(found._buffer, found.aval)

    def same(self) -> Array:
        """Return another object of the same memory."""
        return Array(self._buffer, self.aval)

    def __deepcopy__(self, memo: Any) -> Array:
        return self.copy_of()

    def copy_of(self) -> Array:
        """Return a copy."""
        return Array.of(self.copy())

    def __repr__(self) -> str:
        if self.is_deleted():
            return f"Array(deleted, shape={self.shape}, dtype={self.dtype})"
        text = np.array2string(self.numpy(), separator=", ", prefix="Array(", threshold=1000)
        return f"Array({text}, dtype={self.dtype})"


def array(values: np.ndarray[Any, Any], shared: bool = False) -> Array:
    """Return an array with these elements.

    shared: whether it may read the memory of `values` for as long as it lives, which then must not change.
    """
    contiguous = np.ascontiguousarray(values).reshape(values.shape)
    found = arrays.put(contiguous, arrays.single_device(), donated=not shared)
    return Array(found._buffer, found.aval)


def run(primitive: Primitive, values: Sequence[Any], params: Mapping[str, Any]) -> list[Array]:
    """Run an operation on arrays, NumPy's among them, and return its results. Raises what its rule of shapes raises."""
    operands = [value if isinstance(value, Array) else _known(value) for value in values]
    key = primitive, *params.items(), *[operand.aval for operand in operands]
    executable = _EXECUTABLES.get(key)
    if executable is None:
        executable = _compiled(primitive, operands, params)
        if not any(map(has_programs, params.values())):  # of those nobody asks again for the same
            _EXECUTABLES[key] = executable
    results = executable.execute([operand._buffer for operand in operands])
    return list(map(Array, results, executable.results))


_EXECUTABLES: dict[tuple[Any, ...], Executable] = {}
_LOCK = threading.Lock()
"""Held while a module of the shared context is built."""


def _known(value: Any) -> Array:
    if isinstance(value, Tracer):
        what = f"a value of the traced function {value._trace.name} ({value.aval}) is used outside of it"
        raise LeakedTracer(f"{what}; return it from the function")
    if isinstance(value, Literal):
        return _scalar(value.value.dtype, value.value.tobytes())
    return array(np.asarray(value))


@functools.lru_cache(1024)
def _scalar(dtype: np.dtype[Any], elements: bytes) -> Array:
    """Return a scalar on the device, which no operation donates: putting it there takes as long as an operation."""
    return array(np.frombuffer(elements, dtype).reshape(()))


def _compiled(primitive: Primitive, operands: Sequence[Array], params: Mapping[str, Any]) -> Executable:
    inputs = [Variable(ShapedArray(operand.shape, operand.dtype)) for operand in operands]
    outputs = [Variable(aval) for aval in primitive.results([one.aval for one in inputs], params)]
    program = Program(inputs, [Equation(primitive, inputs, params, outputs)], outputs)
    with _LOCK:
        return load(program, _context())


@functools.cache
def _context() -> ir.Context:
    """Return a context for modules without constants, which it would keep for ever."""
    from stagec.pjrt import dialects

    return dialects.make_context()


def load(program: Program, context: ir.Context) -> Executable:
    """Compile a program of static shapes for the first CPU device of this process."""
    from stagec.stages import mlir  # only what compiles needs it

    device = clients.devices()[0]
    with context, ir.Location.unknown(context):
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            main = main_function(list(map(tensor_type, program.in_avals)), list(map(tensor_type, program.out_avals)))
            with ir.InsertionPoint(main.entry_block):
                func.return_(Lowering(("cpu",)).program(program, list(main.entry_block.arguments)))
        custom_calls.register_custom_calls(mlir.custom_calls(module))
        with turns.for_this_machine():
            options = clients.compile_options([device.id])
            loaded = device.client.compile_and_load(module, _jax.DeviceList((device,)), options)
    parameters, results = (
        [(aval.shape, aval.dtype) for aval in avals] for avals in (program.in_avals, program.out_avals)
    )
    return Executable(loaded, parameters, results, [device])
