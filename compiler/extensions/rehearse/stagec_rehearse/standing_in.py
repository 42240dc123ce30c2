"""A program of the same arguments and results that returns zeros, for one that a virtual device cannot run.

Kernels of XLA's own do nothing on a virtual device. Those of cuDNN, cuBLAS and the like, and exchanges between devices,
need the vendor's libraries, which ask a device for more than a virtual one has. XLA still compiles such a program.
"""

from __future__ import annotations

import re
from typing import Any

from jax._src import compiler
from jaxlib import xla_client
from jaxlib.mlir import ir

_OTHERS = re.compile(
    r'custom_call_target="((?:__cu|(?:cu|hip)(?:dnn|blas|solver|fft|sparse)|__op\$|xla_ffi_)[^"]*|[^"]*_ffi)"'
    r"| (?:all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all|ragged-all-to-all|collective-broadcast)"
    r"(?:-start)?\(| (?:fft|triangular-solve|cholesky)\("
)
"""What of an optimized program is more than XLA's own kernels."""
_TYPE = re.compile(r"tensor<(?:\d+x)*([^>]+>?)>")
_KEPT = ("tf.aliasing_output", "jax.buffer_donor")


def needs(executable: Any) -> str:
    """Return what an executable calls that a virtual device lacks; "" if it can run."""
    for module in executable.hlo_modules():
        if match := _OTHERS.search(module.to_string()):
            return match[1] or match[0].strip(" (")
    return ""


def stand_in(
    executable: Any, module: ir.Module, main: Any, arguments: Any, backend: Any, devices: Any, options: Any
) -> Any:
    """Compile the program of zeros with the shardings that `executable` has.

    main: the function of `module`. arguments: its arguments' attributes.
    """
    function = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    taken, given = executable.get_parameter_shardings(), executable.get_output_shardings()
    names = ir.StringAttr(module.operation.attributes["sym_name"]).value
    parameters = []
    for position, (type_, held) in enumerate(zip(function.inputs, arguments, strict=True)):
        attributes = [f"{name} = {held[name]}" for name in _KEPT if name in held]
        attributes += [_sharding(taken[position])] if taken else []
        parameters.append(f"%arg{position}: {type_} {{{', '.join(attributes)}}}")
    results = [
        f"{type_} {{{_sharding(given[position])}}}" if given else f"{type_}"
        for position, type_ in enumerate(function.results)
    ]
    body = [f"%r{position} = {_zeros(type_)}" for position, type_ in enumerate(function.results)]
    returned = ", ".join(f"%r{position}" for position in range(len(results)))
    types = ", ".join(map(str, function.results))
    text = f"""
module @"{names}" attributes {{mhlo.num_partitions = {options.num_partitions} : i32, mhlo.num_replicas = 1 : i32}} {{
  func.func public @main({", ".join(parameters)}) -> ({", ".join(results)}) {{
    {"".join(f"{line}{chr(10)}    " for line in body)}return {f"{returned} : {types}" if results else ""}
  }}
}}"""
    with module.context:
        made = ir.Module.parse(text)
    options.executable_build_options.use_shardy_partitioner = False  # XLA says shardings of an executable as GSPMD's
    options.executable_build_options.allow_spmd_sharding_propagation_to_output = [False]
    options.executable_build_options.allow_spmd_sharding_propagation_to_parameters = [False]
    return compiler.backend_compile_and_load(backend, made, devices, options, [])


def _sharding(sharding: Any) -> str:
    return f'mhlo.sharding = "{xla_client.HloSharding.from_proto(sharding)!r}"'


def _zeros(type_: ir.Type) -> str:
    if str(type_) == "!stablehlo.token":
        return "stablehlo.create_token : !stablehlo.token"
    match = _TYPE.fullmatch(str(type_))
    element = match[1] if match else ""
    zero = "(0.0,0.0)" if element.startswith("complex") else "0.0" if element.startswith(("f", "bf")) else "0"
    return f"stablehlo.constant dense<{'false' if element == 'i1' else zero}> : {type_}"
