"""What custom calls of devices compute, in instructions that CPUs run: those of cuBLAS, cuDNN, cuSOLVER and XLA:TPU.

Their names, operands and configurations are those of XLA (xla/service/gpu/cublas_cudnn.h, backend_configs.proto) and of
JAX (jaxlib/gpu/solver_kernels_ffi.h). What is not here is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from stagec.costs import hlo
from stagec.costs.hlo import Instruction
from stagec.stages.hlo_writer import Array, Refused, Writer, array, attributes, listed, plain

_LETTERS = {"f32": "s", "f64": "d", "c64": "c", "c128": "z"}
_WIDER = {"bf16": "f32", "f16": "f32", "s8": "s32", "u8": "s32"}


def rewrite(instruction: Instruction, writer: Writer) -> str:
    """Write what a custom call computes; return its name. Raises Refused."""
    target = attributes(instruction.attributes)["custom_call_target"].strip('"')
    if target not in CALLS:
        raise Refused("it has no reference implementation")
    return CALLS[target](instruction, writer)


def _config(instruction: Instruction) -> dict[str, Any]:
    text = attributes(instruction.attributes).get("backend_config", "{}")
    try:
        config: dict[str, Any] = json.loads(text)
    except ValueError:
        pairs = (pair.partition(" = ") for pair in text.strip("{}").split(", "))
        return {name: {"true": True, "false": False}.get(value, value) for name, _, value in pairs if name}
    return config


def _results(instruction: Instruction, writer: Writer, *values: str) -> str:
    """The result of a call, with what it has beside that nobody reads: its workspace."""
    type_ = plain(instruction.type)
    if not type_.startswith("("):
        return values[0]
    rest = hlo.parts(type_)[len(values) :]
    return writer.add(type_, "tuple", *values, *map(writer.zeros, rest))


def _result(instruction: Instruction) -> Array:
    return array(plain(hlo.elements(instruction.type)[0]))


def _binary(writer: Writer, opcode: str, a: str, b: str) -> str:
    return writer.add(writer.types[a], opcode, a, b)


def _scaled(writer: Writer, value: str, by: float) -> str:
    return value if by == 1 else _binary(writer, "multiply", value, writer.full(writer.types[value], repr(float(by))))


def _along(writer: Writer, vector: str, type_: Array, axis: int) -> str:
    return writer.add(type_.plain, "broadcast", writer.cast(vector, type_.dtype), dimensions=listed([axis]))


def _relu(writer: Writer, value: str) -> str:
    return _binary(writer, "maximum", value, writer.full(writer.types[value], "0"))


def _gelu(writer: Writer, value: str) -> str:
    """As cuBLAS has it: by tanh."""
    type_ = writer.types[value]
    cube = _binary(writer, "multiply", value, _binary(writer, "multiply", value, value))
    inner = _scaled(writer, _binary(writer, "add", value, _scaled(writer, cube, 0.044715)), 0.7978845608028654)
    gate = _binary(writer, "add", writer.add(type_, "tanh", inner), writer.full(type_, "1"))
    return _binary(writer, "multiply", _scaled(writer, value, 0.5), gate)


_EPILOGUES: Mapping[str, tuple[bool, Callable[[Writer, str], str] | None]] = {
    "DEFAULT": (False, None),
    "BIAS": (True, None),
    "RELU": (False, _relu),
    "BIAS_RELU": (True, _relu),
    "GELU": (False, _gelu),
    "BIAS_GELU": (True, _gelu),
}
"""What follows a product: whether a vector is added, and what is applied then."""


def _dot_dims(config: Mapping[str, Any]) -> dict[str, str]:
    """The dimensions of a product, as attributes of a dot."""
    dims = {
        f"{side}_{kind}_dims": listed(
            list(map(int, config["dot_dimension_numbers"].get(f"{side}_{kind}_dimensions", [])))
        )
        for side in ("lhs", "rhs")
        for kind in ("contracting", "batch")
    }
    return {name: dim for name, dim in dims.items() if dim != "{}"}


def _product(instruction: Instruction, writer: Writer) -> str:
    """`alpha * a @ b + beta * c`, and an epilogue."""
    config = _config(instruction)["gemm_backend_config"]
    epilogue = config.get("epilogue", "DEFAULT")
    if epilogue not in _EPILOGUES or config.get("alpha_imag"):
        raise Refused(f"epilogue {epilogue}, alpha {config.get('alpha_imag')} i")
    with_bias, activation = _EPILOGUES[epilogue]
    type_, operands = _result(instruction), writer.operands(instruction)
    if len(operands) != 2 + bool(config.get("beta")) + with_bias:
        raise Refused(f"it has {len(operands)} operands")
    wide = type_._replace(dtype=_WIDER.get(type_.dtype, type_.dtype))
    value = writer.add(wide.plain, "dot", *operands[:2], **_dot_dims(config))
    value = _scaled(writer, value, config.get("alpha_real", 1))
    if config.get("beta"):
        value = _binary(writer, "add", value, _scaled(writer, writer.cast(operands[2], wide.dtype), config["beta"]))
    if with_bias:
        value = _binary(writer, "add", value, _along(writer, operands[-1], wide, len(wide.dims) - 1))
    if activation:
        value = activation(writer, value)
    return _results(instruction, writer, writer.cast(value, type_.dtype))


def _product_of_eighths(instruction: Instruction, writer: Writer) -> str:
    """`a @ b`, each with a scale; with more operands XLA writes other products, whose order is not known here."""
    config = _config(instruction)["gemm_backend_config"]
    if config.get("beta") or config.get("epilogue", "DEFAULT") != "DEFAULT" or len(instruction.operands) != 4:
        raise Refused(f"it has {len(instruction.operands)} operands, and epilogue {config.get('epilogue')}")
    type_ = _result(instruction)
    a, b, *scales = writer.operands(instruction)
    wide = type_._replace(dtype="f32").plain
    value = writer.add(wide, "dot", writer.cast(a, "f32"), writer.cast(b, "f32"), **_dot_dims(config))
    for scale in scales:
        value = _binary(writer, "multiply", value, writer.add(wide, "broadcast", scale, dimensions="{}"))
    return _results(instruction, writer, writer.cast(value, type_.dtype))


def _top(instruction: Instruction, writer: Writer) -> str:
    """The largest elements of each row, and where they were: those of a stable sort."""
    (operand,) = writer.operands(instruction)
    given, (values, indices) = array(writer.types[operand]), _arrays(instruction)
    last = len(given.dims) - 1
    places = writer.add(given._replace(dtype=indices.dtype).plain, "iota", iota_dimension=str(last))
    scalars = f"{given.dtype}[]", f"{indices.dtype}[]"
    lines = [f"%{name} = {scalars[i // 2]} parameter({i})" for i, name in enumerate("abij")]
    lines.append("ROOT %c = pred[] compare(%a, %b), direction=GT, type=TOTALORDER")
    larger = writer.function("{\n  " + "\n  ".join(lines) + "\n}")
    types = [writer.types[operand], writer.types[places]]
    options = {"dimensions": listed([last]), "is_stable": "true", "to_apply": f"%{larger}"}
    made = writer.add(f"({', '.join(types)})", "sort", operand, places, **options)
    first = "{" + ", ".join(f"[0:{size}]" for size in values.dims) + "}"
    parts = [
        writer.add(type_.plain, "slice", writer.element(made, i), slice=first)
        for i, type_ in enumerate((values, indices))
    ]
    return writer.add(plain(instruction.type), "tuple", *parts)


def _triangular_solve(instruction: Instruction, writer: Writer) -> str:
    options = {name: str(value).lower() for name, value in _config(instruction).items()}
    options["transpose_a"] = options["transpose_a"].upper()
    solved = writer.add(_result(instruction).plain, "triangular-solve", *writer.operands(instruction)[:2], **options)
    return _results(instruction, writer, solved)


class _Window:
    """The window and the dimensions of a convolution: those of the one that it is, or is a derivative of."""

    def __init__(self, instruction: Instruction) -> None:
        given = attributes(instruction.attributes)
        fields = dict(field.split("=") for field in given["window"].strip("{}").split())
        rank = len(fields.get("size", "").split("x")) if fields else 0

        def numbers(name: str, default: int) -> list[int]:
            return list(map(int, fields[name].split("x"))) if name in fields else [default] * rank

        self.size, self.strides, self.dilation = numbers("size", 1), numbers("stride", 1), numbers("rhs_dilate", 1)
        self.reversal = numbers("rhs_reversal", 0)
        pads = [pad.split("_") for pad in fields["pad"].split("x")] if "pad" in fields else [["0", "0"]] * rank
        self.low = [int(low) for low, _ in pads]
        self.rank = rank
        self.inputs, rest = given["dim_labels"].split("_")
        self.kernel, self.outputs = rest.split("->")
        self.groups = int(given.get("feature_group_count", "1"))
        if "lhs_dilate" in fields or int(given.get("batch_group_count", "1")) != 1:
            raise Refused("it is dilated, or has groups of batches")

    def spatial(self, type_: Array, labels: str) -> list[int]:
        return [type_.dims[labels.index(str(axis))] for axis in range(self.rank)]


def _window(size: list[int], pads: list[tuple[int, int]], **more: list[int]) -> str:
    fields = {"size": size, **more}
    text = [f"{name}={'x'.join(map(str, numbers))}" for name, numbers in fields.items()]
    return "{" + " ".join([*text, f"pad={'x'.join(f'{low}_{high}' for low, high in pads)}"]) + "}"


def _convolved(instruction: Instruction, writer: Writer) -> str:
    given = attributes(instruction.attributes)
    _Window(instruction)
    type_ = _result(instruction)
    wide = type_._replace(dtype=_WIDER.get(type_.dtype, type_.dtype))
    kept = {name: given[name] for name in ("window", "dim_labels", "feature_group_count") if name in given}
    value = writer.add(wide.plain, "convolution", *writer.operands(instruction)[:2], **kept)
    return _scaled(writer, value, _config(instruction)["cudnn_conv_backend_config"].get("conv_result_scale", 1))


def _convolution(instruction: Instruction, writer: Writer) -> str:
    value = writer.cast(_convolved(instruction, writer), _result(instruction).dtype)
    return _results(instruction, writer, value)


def _convolution_with_bias(instruction: Instruction, writer: Writer) -> str:
    """`activation(scale * convolution + side * scale of that + bias)`."""
    config = _config(instruction)["cudnn_conv_backend_config"]
    mode = config.get("activation_mode", "kNone")
    if mode not in ("kNone", "kRelu"):
        raise Refused(f"activation {mode}")
    value = _convolved(instruction, writer)
    _, _, bias, *side = writer.operands(instruction)
    type_ = array(writer.types[value])
    if side and config.get("side_input_scale", 0):
        added = _scaled(writer, writer.cast(side[0], type_.dtype), config["side_input_scale"])
        value = _binary(writer, "add", value, added)
    value = _binary(writer, "add", value, _along(writer, bias, type_, _Window(instruction).outputs.index("f")))
    value = _relu(writer, value) if mode == "kRelu" else value
    return _results(instruction, writer, writer.cast(value, _result(instruction).dtype))


def _input_gradient(instruction: Instruction, writer: Writer) -> str:
    """The derivative by the input: the outputs' cotangents, spread by the strides, convolved with the kernel turned."""
    window, type_ = _Window(instruction), _result(instruction)
    cotangents, kernel = writer.operands(instruction)[:2]
    if window.groups > 1:
        kernel = _regrouped(writer, kernel, window)
    given = window.spatial(array(writer.types[cotangents]), window.outputs)
    spans = [(size - 1) * by + 1 for size, by in zip(window.size, window.dilation, strict=True)]
    spread = [(size - 1) * by + 1 for size, by in zip(given, window.strides, strict=True)]
    lows = [span - 1 - low for span, low in zip(spans, window.low, strict=True)]
    sizes = window.spatial(type_, window.inputs)
    highs = [size - s - low + span - 1 for size, s, low, span in zip(sizes, spread, lows, spans, strict=True)]
    text = _window(
        window.size,
        list(zip(lows, highs, strict=True)),
        lhs_dilate=window.strides,
        rhs_dilate=window.dilation,
        rhs_reversal=[1 - turned for turned in window.reversal],
    )
    labels = f"{window.outputs}_{window.kernel.translate(_TURNED)}->{window.inputs}"
    groups = {"feature_group_count": str(window.groups)} if window.groups > 1 else {}
    wide = type_._replace(dtype=_WIDER.get(type_.dtype, type_.dtype))
    value = writer.add(wide.plain, "convolution", cotangents, kernel, window=text, dim_labels=labels, **groups)
    value = _scaled(writer, value, _config(instruction)["cudnn_conv_backend_config"].get("conv_result_scale", 1))
    return _results(instruction, writer, writer.cast(value, type_.dtype))


_TURNED = str.maketrans("io", "oi")


def _regrouped(writer: Writer, kernel: str, window: _Window) -> str:
    """A kernel of groups whose inputs and outputs change places: each group keeps its own."""
    type_ = array(writer.types[kernel])
    inputs, outputs = window.kernel.index("i"), window.kernel.index("o")
    each = type_.dims[outputs] // window.groups
    split = (*type_.dims[:outputs], window.groups, each, *type_.dims[outputs + 1 :])
    # The dimension of groups goes to where the inputs are.
    order = [axis for axis in range(len(split)) if axis != outputs]
    order.insert(order.index(inputs + (inputs > outputs)), outputs)
    moved = [split[axis] for axis in order]
    sizes = list(type_.dims)
    sizes[outputs], sizes[inputs] = each, type_.dims[inputs] * window.groups

    def typed(dims: Any) -> str:
        return Array(type_.dtype, tuple(dims), ()).plain

    value = writer.add(typed(split), "reshape", kernel)
    value = writer.add(typed(moved), "transpose", value, dimensions=listed(order))
    return writer.add(typed(sizes), "reshape", value)


def _kernel_gradient(instruction: Instruction, writer: Writer) -> str:
    """The derivative by the kernel: inputs convolved with cotangents, over the batch."""
    window, type_ = _Window(instruction), _result(instruction)
    inputs, cotangents = writer.operands(instruction)[:2]
    taken = window.spatial(array(writer.types[inputs]), window.inputs)
    given = window.spatial(array(writer.types[cotangents]), window.outputs)
    if any(window.reversal):
        raise Refused("its window is turned")
    rows = zip(taken, given, window.size, window.strides, window.dilation, window.low, strict=True)
    highs = [(k - 1) * dilated + (o - 1) * by + 1 - i - low for i, o, k, by, dilated, low in rows]
    text = _window(given, list(zip(window.low, highs, strict=True)), stride=window.dilation, rhs_dilate=window.strides)
    swapped = str.maketrans("bf", "fb"), str.maketrans("bf", "io"), str.maketrans("io", "bf")
    labels = [
        part.translate(to) for part, to in zip((window.inputs, window.outputs, window.kernel), swapped, strict=True)
    ]
    groups = {"batch_group_count": str(window.groups)} if window.groups > 1 else {}
    wide = type_._replace(dtype=_WIDER.get(type_.dtype, type_.dtype))
    named = f"{labels[0]}_{labels[1]}->{labels[2]}"
    value = writer.add(wide.plain, "convolution", inputs, cotangents, window=text, dim_labels=named, **groups)
    value = _scaled(writer, value, _config(instruction)["cudnn_conv_backend_config"].get("conv_result_scale", 1))
    return _results(instruction, writer, writer.cast(value, type_.dtype))


def _lapack(writer: Writer, routine: str, results: list[Array], operands: list[str], config: str = "") -> str:
    """A call of LAPACK, with matrices column by column; its results are a tuple."""
    taken = [array(writer.types[operand]) for operand in operands]
    letter = _LETTERS.get(taken[0].dtype)
    if letter is None:
        raise Refused(f"LAPACK has no {taken[0].dtype}")
    constraints = "{" + ", ".join(map(_by_columns, taken)) + "}"
    return writer.write(
        f"({', '.join(map(_by_columns, results))})",
        f"custom-call({', '.join(f'%{operand}' for operand in operands)})",
        {
            "custom_call_target": f'"lapack_{letter}{routine}_ffi"',
            "operand_layout_constraints": constraints,
            "api_version": "API_VERSION_TYPED_FFI",
            "backend_config": f"{{{config}}}",
        },
    )


def _by_columns(type_: Array) -> str:
    rank = len(type_.dims)
    order = [rank - 2, rank - 1, *reversed(range(rank - 2))] if rank > 1 else list(range(rank))
    return type_.plain + (listed(order) if order else "")


def _arrays(instruction: Instruction) -> list[Array]:
    return [array(plain(type_)) for type_ in hlo.elements(instruction.type)]


def _cholesky(instruction: Instruction, writer: Writer) -> str:
    (operand,) = writer.operands(instruction)
    lower = str(_config(instruction)["lower"]).lower()
    return _results(instruction, writer, writer.add(writer.types[operand], "cholesky", operand, lower=lower))


def _same_routine(name: str) -> Callable[[Instruction, Writer], str]:
    """LAPACK's routine of the same name, which has the same operands and results."""

    def write(instruction: Instruction, writer: Writer) -> str:
        made = _lapack(writer, name, _arrays(instruction), writer.operands(instruction))
        return made if instruction.type.startswith("(") else writer.element(made, 0)

    return write


def _orthogonal(instruction: Instruction, writer: Writer) -> str:
    letter = "or" if _result(instruction).dtype.startswith("f") else "un"
    return _same_routine(f"{letter}gqr")(instruction, writer)


def _eigenvalues(instruction: Instruction, writer: Writer) -> str:
    letter = "sy" if _result(instruction).dtype.startswith("f") else "he"
    uplo = ord("L" if _config(instruction)["lower"] else "U")
    config = f"mode = {ord('V')} : ui8, uplo = {uplo} : ui8"
    return _lapack(writer, f"{letter}evd", _arrays(instruction), writer.operands(instruction), config)


def _singular_values(instruction: Instruction, writer: Writer) -> str:
    """`(a, s, u, v, info)`: by Jacobi's method `v` is not transposed."""
    config, results = _config(instruction), _arrays(instruction)
    if results[0].dtype.startswith("c"):
        raise Refused("of complex numbers")
    a, s, u, v, info = results
    letter = "N" if not config["compute_uv"] else "A" if config["full_matrices"] else "S"
    turned = v._replace(dims=(*v.dims[:-2], v.dims[-1], v.dims[-2]))
    made = _lapack(
        writer, "gesdd", [a, s, u, turned, info], writer.operands(instruction), f"mode = {ord(letter)} : ui8"
    )
    order = [*range(len(v.dims) - 2), len(v.dims) - 1, len(v.dims) - 2]
    v_ = writer.add(v.plain, "transpose", writer.element(made, 3), dimensions=listed(order))
    values = [v_ if i == 3 else writer.element(made, i) for i in range(5)]
    return writer.add(plain(instruction.type), "tuple", *values)


def _permutation(instruction: Instruction, writer: Writer) -> str:
    """Rows exchanged with those that pivots name, one after the other."""
    (pivots,) = writer.operands(instruction)
    result = _result(instruction)
    if len(result.dims) != 1:
        raise Refused("of a batch")
    given, state = array(writer.types[pivots]), f"(s32[], {writer.types[pivots]}, {result.plain})"
    (count,) = given.dims
    head = f"""  %t = {state} parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
"""
    condition = writer.function(
        f"{{\n{head}  %n = s32[] constant({count})\n  ROOT %c = pred[] compare(%i, %n), direction=LT\n}}"
    )
    single = "s32[1] dynamic-slice"
    body = writer.function(f"""{{
{head}  %p = {given.plain} get-tuple-element(%t), index=1
  %a = {result.plain} get-tuple-element(%t), index=2
  %js = {single}(%p, %i), dynamic_slice_sizes={{1}}
  %j = s32[] reshape(%js)
  %x = {single}(%a, %i), dynamic_slice_sizes={{1}}
  %y = {single}(%a, %j), dynamic_slice_sizes={{1}}
  %a1 = {result.plain} dynamic-update-slice(%a, %y, %i)
  %a2 = {result.plain} dynamic-update-slice(%a1, %x, %j)
  %o = s32[] constant(1)
  %n = s32[] add(%i, %o)
  ROOT %r = {state} tuple(%n, %p, %a2)
}}""")
    rows = writer.add(result.plain, "iota", iota_dimension="0")
    begin = writer.add(state, "tuple", writer.constant("s32", "0"), pivots, rows)
    return writer.element(writer.add(state, "while", begin, condition=f"%{condition}", body=f"%{body}"), 2)


def _first(instruction: Instruction, writer: Writer) -> str:
    """A call that says something about its operand, which is its result."""
    return writer.cast(writer.operands(instruction)[0], _result(instruction).dtype)


def _buffer(instruction: Instruction, writer: Writer) -> str:
    """Memory in which nothing is yet: what reads it gives no number."""
    type_ = _result(instruction)
    floating = type_.dtype.startswith(("f", "bf"))
    return writer.full(type_.plain, "nan") if floating else writer.zeros(type_.plain)


def _halves(opcode: str) -> Callable[[Instruction, Writer], str]:
    """A half of complex numbers, or both together: TPUs have them apart."""

    def write(instruction: Instruction, writer: Writer) -> str:
        operands = writer.operands(instruction)
        whole = _result(instruction) if opcode == "complex" else array(writer.types[operands[0]])
        if whole.dtype != "c64":
            raise Refused(f"of {whole.dtype}")
        return writer.add(_result(instruction).plain, opcode, *operands)

    return write


def _lower_factor(instruction: Instruction, writer: Writer) -> str:
    type_ = _result(instruction).plain
    return writer.add(type_, "cholesky", *writer.operands(instruction), lower="true")


def _inverse(lower: str) -> Callable[[Instruction, Writer], str]:
    """The inverses of triangular matrices."""

    def write(instruction: Instruction, writer: Writer) -> str:
        type_ = _result(instruction)
        *_, size, _ = type_.dims
        square = f"[{size},{size}]"
        rows, columns = (writer.add(f"s32{square}", "iota", iota_dimension=axis) for axis in "01")
        equal = writer.add(f"pred{square}", "compare", rows, columns, direction="EQ")
        unit = writer.add(f"{type_.dtype}{square}", "convert", equal)
        batch = len(type_.dims) - 2
        ones = writer.add(type_.plain, "broadcast", unit, dimensions=listed([batch, batch + 1]))
        options = {"left_side": "true", "lower": lower, "unit_diagonal": "false", "transpose_a": "NO_TRANSPOSE"}
        return writer.add(type_.plain, "triangular-solve", *writer.operands(instruction), ones, **options)

    return write


def _started(instruction: Instruction, writer: Writer) -> str:
    """A collective that goes on while other things are computed: its operand, its result, and more of the device."""
    (collective,) = instruction.operands
    (operand,) = writer.computation.instructions[collective].operands
    return _results(instruction, writer, writer.values[operand], writer.values[collective])


def _ended(instruction: Instruction, writer: Writer) -> str:
    return writer.operands(instruction)[2]


def _nothing(instruction: Instruction, writer: Writer) -> str:
    return writer.zeros(plain(instruction.type))


CALLS: dict[str, Callable[[Instruction, Writer], str]] = {
    "AllocateBuffer": _buffer,
    "AssumeGatherIndicesInBound": _first,
    "AsyncCollectiveDone": _ended,
    "AsyncCollectiveStart": _started,
    "Cholesky": _lower_factor,
    "GatherScatterIndicesBitpacked": _first,
    "InvertDiagBlocksLowerTriangular": _inverse("true"),
    "InvertDiagBlocksUpperTriangular": _inverse("false"),
    "PrepareAsyncCallDone": _nothing,
    "PrepareAsyncCallStart": _nothing,
    "X64Combine": _halves("complex"),
    "X64SplitHigh": _halves("imag"),
    "X64SplitLow": _halves("real"),
    "__cublas$gemm": _product,
    "__cublas$lt$matmul": _product,
    "__cublas$lt$matmul$f8": _product_of_eighths,
    "__cublas$triangularSolve": _triangular_solve,
    "__cudnn$convBackwardFilter": _kernel_gradient,
    "__cudnn$convBackwardInput": _input_gradient,
    "__cudnn$convBiasActivationForward": _convolution_with_bias,
    "__cudnn$convForward": _convolution,
    "__gpu$TopK": _top,
    "cu_lu_pivots_to_permutation": _permutation,
    "cusolver_geqrf_ffi": _same_routine("geqrf"),
    "cusolver_gesvdj_ffi": _singular_values,
    "cusolver_getrf_ffi": _same_routine("getrf"),
    "cusolver_orgqr_ffi": _orthogonal,
    "cusolver_potrf_ffi": _cholesky,
    "cusolver_syevd_ffi": _eigenvalues,
}
"""By the name of a call, what writes it."""
