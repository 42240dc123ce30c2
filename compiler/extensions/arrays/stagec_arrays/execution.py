"""Arrays outside a trace, and how operations run on them at once.

An operation is a program of one equation. It is compiled for the abstract values of its operands, and kept. Data that
only moves (an array from NumPy, an element that is read) needs no program: a CPU's buffers are memory of this process.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from stagec.pjrt import arrays, clients, custom_calls, dialects, turns
from stagec.pjrt.executable import Executable
from stagec_arrays import dtypes, tracing
from stagec_arrays.locations import here
from stagec_arrays.lowering import Lowering, main_function, tensor_type
from stagec_arrays.program import Equation, Primitive, Program, Variable, has_programs, pruned
from stagec_arrays.tracing import LeakedTracer, Tracer
from stagec_arrays.values import Literal, ShapedArray, Value, physical, shown


class Array(arrays.DeviceArray, Value):
    """An array with elements, on a device: functions of `stagec_arrays.numpy` return it outside a trace.

    NumPy reads it (`numpy.asarray`), and libraries share its memory by DLPack.
    It has the methods of the standard's array object
    (https://data-apis.org/array-api/2024.12/API_specification/array_object.html).
    """

    __slots__ = ("__weakref__", "_view")

    @staticmethod
    def of(array: arrays.DeviceArray) -> Array:
        """Return an array of the loader's as one with operators."""
        return Array(array._buffer, array.aval)

    def same(self) -> Array:
        """Return another object of the same memory."""
        return Array(self._buffer, self.aval)

    def __copy__(self) -> Array:
        return self.copy_of()

    def __deepcopy__(self, memo: Any) -> Array:
        return self.copy_of()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it as NumPy's array, PRNG keys as their words: unpickling puts it on the first CPU device.

        Raises TypeError for an array on several devices, CallError ("deleted").
        """
        is_key = self.dtype is dtypes.KEY
        return restored, ((self.words() if is_key else self)._whole(), is_key)

    def copy_of(self) -> Array:
        """Return a copy."""
        return Array.of(self.copy())

    def words(self) -> Array:
        """Return the words of PRNG keys, u32 in a last dimension, which are the same memory."""
        return Array(self._buffer, arrays.abstract_array((*self.shape, 2), dtypes.uint32, self.sharding))

    def as_keys(self) -> Array:
        """Return the PRNG keys whose words these are."""
        return Array(self._buffer, arrays.abstract_array(self.shape[:-1], dtypes.KEY, self.sharding))

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the elements. Raises TypeError for PRNG keys, CallError ("deleted")."""
        self._check_numbers("NumPy")
        return super().numpy()

    def __dlpack__(self, **options: Any) -> Any:
        self._check_numbers("DLPack")
        return super().__dlpack__(**options)

    def _check_numbers(self, library: str) -> None:
        if self.dtype is dtypes.KEY:
            raise TypeError(f"{library} does not have PRNG keys; write stagec_arrays.random.key_data(key)")

    def __repr__(self) -> str:
        if self.is_deleted():
            return super().__repr__()
        if self.dtype is dtypes.KEY:
            return f"Array({shown(self.shape)}, dtype={self.dtype}) overlaying:\n{self.words().numpy()}"
        text = np.array2string(self.numpy(), separator=", ", prefix="Array(", threshold=1000)
        return f"Array({text}, dtype={self.dtype})"


def restored(values: np.ndarray[Any, Any], is_key: bool) -> Array:
    """Return a pickled array, on the first CPU device. is_key: whether it has the words of PRNG keys."""
    result = array(values)
    return result.as_keys() if is_key else result


def array(values: np.ndarray[Any, Any], shared: bool = False) -> Array:
    """Return an array with these elements.

    shared: whether it may read the memory of `values` for as long as it lives, which then must not change.
    """
    contiguous = np.ascontiguousarray(values).reshape(values.shape)
    result = arrays.put(contiguous, arrays.single_device(), donated=not shared)
    return Array(result._buffer, result.aval)


def run(primitive: Primitive, values: Sequence[Any], params: Mapping[str, Any]) -> list[Array]:
    """Run an operation on arrays, NumPy's among them, and return its results. Raises what its rule of shapes raises."""
    operands = [value if isinstance(value, Array) else _known(value) for value in values]
    key = primitive, *params.items(), *[operand.aval for operand in operands]
    executable = _EXECUTABLES.get(key)
    if executable is None:
        executable = _compiled(primitive, operands, params)
        if not any(map(has_programs, params.values())):  # of those nobody asks again for the same
            _EXECUTABLES[key] = executable
    return list(map(Array, executed(executable, operands), executable.results))


def executed(executable: Executable, operands: Sequence[Array]) -> list[Any]:
    """Return the buffers that an executable gives. Raises CallError ("deleted") for an array that was donated."""
    try:
        return executable.execute([operand._buffer for operand in operands])
    except _jax.JaxRuntimeError:
        for operand in operands:
            operand._check()
        raise


def as_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of arrays run as one program outside a trace, like a `jax.jit` function: XLA fuses it.

    It takes arrays by position, also NumPy's and `Literal`s, and hashable parameters by name; it gives an array, or a
    tuple of them. In a trace it is part of that. What is compiled is kept, for avals and parameters.
    """
    known: dict[Any, tuple[Executable, bool]] = {}

    @functools.wraps(function)
    def call(*values: Any, **params: Any) -> Any:
        if tracing.current() is not None:
            return function(*values, **params)
        operands = [value if isinstance(value, Array) else _known(value) for value in values]
        key = dtypes.x64(), *sorted(params.items()), *[operand.aval for operand in operands]
        compiled = known.get(key)
        if compiled is None:
            compiled = known[key] = _compiled_function(function, operands, params)
        executable, several = compiled
        outputs = executed(executable, operands)
        results = tuple(map(Array, outputs, executable.results))
        return results if several else results[0]

    return call


def _compiled_function(
    function: Callable[..., Any], operands: Sequence[Array], params: Mapping[str, Any]
) -> tuple[Executable, bool]:
    several: list[bool] = []

    def flat(*values: Any) -> Sequence[Any]:
        result = function(*values, **params)
        several.append(isinstance(result, tuple))
        return result if several[0] else (result,)

    avals = [ShapedArray(operand.shape, operand.dtype) for operand in operands]
    program = pruned(tracing.trace(flat, avals, function.__name__, apart=True).program)
    with _LOCK:
        return load(program, dialects.make_context() if program.constants else _context()), several[0]


_EXECUTABLES: dict[tuple[Any, ...], Executable] = {}
_LOCK = threading.Lock()
"""Held while a module of the shared context is built."""


def _known(value: Any) -> Array:
    if isinstance(value, Tracer):
        what = f"a value of the traced function {value._trace.name} ({value.aval}) is used outside it, at {here()}"
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
    outputs = [Variable(aval) for aval in primitive.results([variable.aval for variable in inputs], params)]
    program = Program(inputs, [Equation(primitive, inputs, params, outputs)], outputs)
    with _LOCK:
        return load(program, _context())


@functools.cache
def _context() -> ir.Context:
    """Return a context for modules without constants, which it would keep."""
    return dialects.make_context()


def load(program: Program, context: ir.Context) -> Executable:
    """Compile a program of static shapes for the first CPU device of this process."""
    from stagec.stages import mlir  # only what compiles needs it

    device = clients.own_device()
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
    parameters, results = ([physical(aval)[:2] for aval in avals] for avals in (program.in_avals, program.out_avals))
    executable = Executable(loaded, parameters, results, [device])
    executable.results = [  # as the program has them: keys are keys
        arrays.abstract_array(aval.shape, aval.dtype, result.sharding)
        for aval, result in zip(program.out_avals, executable.results, strict=True)
    ]
    return executable
