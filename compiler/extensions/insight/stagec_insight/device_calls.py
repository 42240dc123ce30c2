"""Custom calls of devices as instructions for CPUs: those of cuBLAS, cuDNN, cuSOLVER and XLA:TPU.

Their names, operands and configurations are those of XLA (xla/service/gpu/cublas_cudnn.h, backend_configs.proto) and of
JAX (jaxlib/gpu/solver_kernels_ffi.h). This module refuses other calls by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stagec.costs import hlo
from stagec.costs.array_types import Array, array
from stagec_insight.hlo_writer import Refused, Writer, listed

_LETTERS = {"f32": "s", "f64": "d", "c64": "c", "c128": "z"}
_WIDER = {"bf16": "f32", "f16": "f32", "s8": "s32", "u8": "s32"}


def rewrite(writer: Writer) -> str:
    """Write the instructions of a custom call; return the name of its result. Raises Refused."""
    target = writer.attributes["custom_call_target"].strip('"')
    if target not in CALLS:
        raise Refused("it has no reference implementation")
    value = CALLS[target](writer)
    if writer.types[value] == writer.type or writer.types[value].startswith("("):
        return value
    return _with_workspace(writer, writer.cast(value, writer.result.dtype))


def _with_workspace(writer: Writer, *values: str) -> str:
    """The result of a call, beside its workspace, which nobody reads."""
    if not writer.type.startswith("("):
        return values[0]
    rest = hlo.parts(writer.type)[len(values) :]
    return writer.add(writer.type, "tuple", *values, *map(writer.zeros, rest))


def _wide(type_: Array) -> Array:
    """The type of sums."""
    return type_._replace(dtype=_WIDER.get(type_.dtype, type_.dtype))


def _scaled(writer: Writer, value: str, by: float) -> str:
    return value if by == 1 else writer.same("multiply", value, writer.full(writer.types[value], repr(float(by))))


def _along(writer: Writer, vector: str, type_: Array, axis: int) -> str:
    return writer.add(type_.plain, "broadcast", writer.cast(vector, type_.dtype), dimensions=listed([axis]))


def _relu(writer: Writer, value: str) -> str:
    return writer.same("maximum", value, writer.full(writer.types[value], "0"))


def _gelu(writer: Writer, value: str) -> str:
    """As cuBLAS has it: by tanh."""
    cube = writer.same("multiply", value, writer.same("multiply", value, value))
    inner = _scaled(writer, writer.same("add", value, _scaled(writer, cube, 0.044715)), 0.7978845608028654)
    gate = writer.same("add", writer.same("tanh", inner), writer.full(writer.types[value], "1"))
    return writer.same("multiply", _scaled(writer, value, 0.5), gate)


def _silu(writer: Writer, value: str) -> str:
    return writer.same("multiply", value, writer.same("logistic", value))


_EPILOGUES: Mapping[str, tuple[bool, Callable[[Writer, str], str] | None]] = {
    "DEFAULT": (False, None),
    "BIAS": (True, None),
    "RELU": (False, _relu),
    "BIAS_RELU": (True, _relu),
    "GELU": (False, _gelu),
    "BIAS_GELU": (True, _gelu),
    "SILU": (False, _silu),  # AMD's alone
    "BIAS_SILU": (True, _silu),
}
"""The operations after a product: whether to add a vector, and the function to apply then."""


def _dot_dims(config: Mapping[str, Any]) -> dict[str, str]:
    """The dimensions of a product, as attributes of a dot."""
    given = config["dot_dimension_numbers"]
    names = [f"{side}_{kind}" for side in ("lhs", "rhs") for kind in ("contracting", "batch")]
    dims = {f"{name}_dims": listed(list(map(int, given.get(f"{name}_dimensions", [])))) for name in names}
    return {name: dim for name, dim in dims.items() if dim != "{}"}


def _product(writer: Writer) -> str:
    """`alpha * a @ b + beta * c`, and an epilogue."""
    config, operands = writer.config["gemm_backend_config"], writer.operands
    epilogue = config.get("epilogue", "DEFAULT")
    if epilogue not in _EPILOGUES or config.get("alpha_imag"):
        raise Refused(f"epilogue {epilogue}, alpha {config.get('alpha_imag')} i")
    with_bias, activation = _EPILOGUES[epilogue]
    if len(operands) != 2 + bool(config.get("beta")) + with_bias:
        raise Refused(f"it has {len(operands)} operands")
    wide = _wide(writer.result)
    value = writer.add(wide.plain, "dot", *operands[:2], **_dot_dims(config))
    value = _scaled(writer, value, config.get("alpha_real", 1))
    if config.get("beta"):
        value = writer.same("add", value, _scaled(writer, writer.cast(operands[2], wide.dtype), config["beta"]))
    if with_bias:
        value = writer.same("add", value, _along(writer, operands[-1], wide, len(wide.dims) - 1))
    return activation(writer, value) if activation else value


def _product_of_eighths(writer: Writer) -> str:
    """`a @ b`, each with a scale; with more operands XLA writes other products in an order unknown here."""
    config, operands = writer.config["gemm_backend_config"], writer.operands
    if config.get("beta") or config.get("epilogue", "DEFAULT") != "DEFAULT" or len(operands) != 4:
        raise Refused(f"it has {len(operands)} operands, and epilogue {config.get('epilogue')}")
    a, b, *scales = operands
    wide = writer.result._replace(dtype="f32").plain
    value = writer.add(wide, "dot", writer.cast(a, "f32"), writer.cast(b, "f32"), **_dot_dims(config))
    for scale in scales:
        value = writer.same("multiply", value, writer.add(wide, "broadcast", scale, dimensions="{}"))
    return value


def _top(writer: Writer) -> str:
    """The largest elements of each row, and their positions, from a stable sort."""
    (operand,) = writer.operands
    given, (values, indices) = array(writer.types[operand]), writer.results
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
    return writer.add(writer.type, "tuple", *parts)


def _triangular_solve(writer: Writer) -> str:
    options = {name: str(value).lower() for name, value in writer.config.items()}
    options["transpose_a"] = options["transpose_a"].upper()
    return writer.add(writer.result.plain, "triangular-solve", *writer.operands[:2], **options)


class _Window:
    """The window and the dimensions of a convolution; for a derivative, those of the original convolution.

    given: attributes. Raises Refused.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
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


def _convolve(writer: Writer, first: str, second: str, **rest: str) -> str:
    """A convolution, scaled as the call says."""
    value = writer.add(_wide(writer.result).plain, "convolution", first, second, **rest)
    return _scaled(writer, value, writer.config["cudnn_conv_backend_config"].get("conv_result_scale", 1))


def _convolution(writer: Writer) -> str:
    given = writer.attributes
    _Window(given)
    kept = {name: given[name] for name in ("window", "dim_labels", "feature_group_count") if name in given}
    return _convolve(writer, *writer.operands[:2], **kept)


def _convolution_with_bias(writer: Writer) -> str:
    """`activation(scale * convolution + side * scale of that + bias)`."""
    config = writer.config["cudnn_conv_backend_config"]
    mode = config.get("activation_mode", "kNone")
    if mode not in ("kNone", "kRelu"):
        raise Refused(f"activation {mode}")
    value = _convolution(writer)
    _, _, bias, *side = writer.operands
    type_ = array(writer.types[value])
    if side and config.get("side_input_scale", 0):
        added = _scaled(writer, writer.cast(side[0], type_.dtype), config["side_input_scale"])
        value = writer.same("add", value, added)
    value = writer.same("add", value, _along(writer, bias, type_, _Window(writer.attributes).outputs.index("f")))
    return _relu(writer, value) if mode == "kRelu" else value


def _input_gradient(writer: Writer) -> str:
    """The derivative by the input: the outputs' cotangents, spread by the strides, convolved with the kernel turned."""
    window, (cotangents, kernel) = _Window(writer.attributes), writer.operands[:2]
    if window.groups > 1:
        kernel = _regrouped(writer, kernel, window)
    given = window.spatial(array(writer.types[cotangents]), window.outputs)
    spans = [(size - 1) * by + 1 for size, by in zip(window.size, window.dilation, strict=True)]
    spread = [(size - 1) * by + 1 for size, by in zip(given, window.strides, strict=True)]
    lows = [span - 1 - low for span, low in zip(spans, window.low, strict=True)]
    sizes = window.spatial(writer.result, window.inputs)
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
    return _convolve(writer, cotangents, kernel, window=text, dim_labels=labels, **groups)


_TURNED = str.maketrans("io", "oi")


def _regrouped(writer: Writer, kernel: str, window: _Window) -> str:
    """A kernel of groups with inputs and outputs exchanged inside each group."""
    type_ = array(writer.types[kernel])
    inputs, outputs = window.kernel.index("i"), window.kernel.index("o")
    each = type_.dims[outputs] // window.groups
    split = (*type_.dims[:outputs], window.groups, each, *type_.dims[outputs + 1 :])
    # Move the dimension of groups to that of the inputs.
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


def _kernel_gradient(writer: Writer) -> str:
    """The derivative by the kernel: inputs convolved with cotangents, over the batch."""
    window, (inputs, cotangents) = _Window(writer.attributes), writer.operands[:2]
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
    named = f"{labels[0]}_{labels[1]}->{labels[2]}"
    return _convolve(writer, inputs, cotangents, window=text, dim_labels=named, **groups)


def _lapack(writer: Writer, routine: str, results: list[Array], config: str = "") -> str:
    """A call of LAPACK, with matrices column by column; its results are a tuple."""
    taken = [array(writer.types[operand]) for operand in writer.operands]
    letter = _LETTERS.get(taken[0].dtype)
    if letter is None:
        raise Refused(f"LAPACK has no {taken[0].dtype}")
    return writer.add(
        f"({', '.join(map(_by_columns, results))})",
        "custom-call",
        *writer.operands,
        custom_call_target=f'"lapack_{letter}{routine}_ffi"',
        operand_layout_constraints="{" + ", ".join(map(_by_columns, taken)) + "}",
        api_version="API_VERSION_TYPED_FFI",
        backend_config=f"{{{config}}}",
    )


def _by_columns(type_: Array) -> str:
    rank = len(type_.dims)
    order = [rank - 2, rank - 1, *reversed(range(rank - 2))] if rank > 1 else list(range(rank))
    return type_.plain + (listed(order) if order else "")


def _same_routine(writer: Writer, name: str) -> str:
    """LAPACK's routine of the same name, with the same operands and results."""
    made = _lapack(writer, name, writer.results)
    return made if writer.type.startswith("(") else writer.element(made, 0)


def _is_real(writer: Writer) -> bool:
    return writer.result.dtype.startswith("f")


def _eigenvalues(writer: Writer) -> str:
    uplo = ord("L" if writer.config["lower"] else "U")
    config = f"mode = {ord('V')} : ui8, uplo = {uplo} : ui8"
    return _lapack(writer, "syevd" if _is_real(writer) else "heevd", writer.results, config)


def _singular_values(writer: Writer) -> str:
    """`(a, s, u, v, info)`: by Jacobi's method `v` is not transposed."""
    config, results = writer.config, writer.results
    if results[0].dtype.startswith("c"):
        raise Refused("of complex numbers")
    a, s, u, v, info = results
    letter = "N" if not config["compute_uv"] else "A" if config["full_matrices"] else "S"
    turned = v._replace(dims=(*v.dims[:-2], v.dims[-1], v.dims[-2]))
    made = _lapack(writer, "gesdd", [a, s, u, turned, info], f"mode = {ord(letter)} : ui8")
    order = [*range(len(v.dims) - 2), len(v.dims) - 1, len(v.dims) - 2]
    v_ = writer.add(v.plain, "transpose", writer.element(made, 3), dimensions=listed(order))
    values = [v_ if i == 3 else writer.element(made, i) for i in range(5)]
    return writer.add(writer.type, "tuple", *values)


def _permutation(writer: Writer) -> str:
    """Exchange rows with the rows of the pivots, one after the other."""
    (pivots,), result = writer.operands, writer.result
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


def _first(writer: Writer) -> str:
    """A call that annotates its operand, and returns it."""
    return writer.operands[0]


def _buffer(writer: Writer) -> str:
    """Uninitialized memory: reading it gives no number."""
    type_ = writer.result
    floating = type_.dtype.startswith(("f", "bf"))
    return writer.full(type_.plain, "nan") if floating else writer.zeros(type_.plain)


def _half(writer: Writer, opcode: str) -> str:
    """A half of complex numbers, or both together: TPUs have them apart."""
    whole = writer.result if opcode == "complex" else array(writer.types[writer.operands[0]])
    if whole.dtype != "c64":
        raise Refused(f"of {whole.dtype}")
    return writer.add(writer.result.plain, opcode, *writer.operands)


def _cholesky(writer: Writer, lower: bool) -> str:
    return writer.add(writer.result.plain, "cholesky", *writer.operands, lower=str(lower).lower())


def _inverse(writer: Writer, lower: str) -> str:
    """The inverses of triangular matrices."""
    type_ = writer.result
    *_, size, _ = type_.dims
    square = f"[{size},{size}]"
    rows, columns = (writer.add(f"s32{square}", "iota", iota_dimension=axis) for axis in "01")
    equal = writer.add(f"pred{square}", "compare", rows, columns, direction="EQ")
    unit = writer.add(f"{type_.dtype}{square}", "convert", equal)
    batch = len(type_.dims) - 2
    ones = writer.add(type_.plain, "broadcast", unit, dimensions=listed([batch, batch + 1]))
    options = {"left_side": "true", "lower": lower, "unit_diagonal": "false", "transpose_a": "NO_TRANSPOSE"}
    return writer.add(type_.plain, "triangular-solve", *writer.operands, ones, **options)


def _started(writer: Writer) -> str:
    """A collective that goes on while other things are computed: its operand, its result, and more of the device."""
    (collective,) = writer.instruction.operands
    (operand,) = writer.computation.instructions[collective].operands
    return _with_workspace(writer, writer.values[operand], writer.values[collective])


def _nothing(writer: Writer) -> str:
    return writer.zeros(writer.type)


CALLS: Mapping[str, Callable[[Writer], str]] = {
    "AllocateBuffer": _buffer,
    "AssumeGatherIndicesInBound": _first,
    "AsyncCollectiveDone": lambda writer: writer.operands[2],
    "AsyncCollectiveStart": _started,
    "Cholesky": lambda writer: _cholesky(writer, lower=True),
    "GatherScatterIndicesBitpacked": _first,
    "InvertDiagBlocksLowerTriangular": lambda writer: _inverse(writer, "true"),
    "InvertDiagBlocksUpperTriangular": lambda writer: _inverse(writer, "false"),
    "PrepareAsyncCallDone": _nothing,
    "PrepareAsyncCallStart": _nothing,
    "X64Combine": lambda writer: _half(writer, "complex"),
    "X64SplitHigh": lambda writer: _half(writer, "imag"),
    "X64SplitLow": lambda writer: _half(writer, "real"),
    "__cublas$gemm": _product,
    "__cublas$lt$matmul": _product,
    "__cublas$lt$matmul$f8": _product_of_eighths,
    "__cublas$triangularSolve": _triangular_solve,
    "__cudnn$convBackwardFilter": _kernel_gradient,
    "__cudnn$convBackwardInput": _input_gradient,
    "__cudnn$convBiasActivationForward": _convolution_with_bias,
    "__cudnn$convForward": _convolution,
    "__gpu$TopK": _top,
    **{
        f"{library}{name}": write
        for name, write in {
            "_lu_pivots_to_permutation": _permutation,
            "solver_geqrf_ffi": lambda writer: _same_routine(writer, "geqrf"),
            "solver_gesvdj_ffi": _singular_values,
            "solver_getrf_ffi": lambda writer: _same_routine(writer, "getrf"),
            "solver_orgqr_ffi": lambda writer: _same_routine(writer, "orgqr" if _is_real(writer) else "ungqr"),
            "solver_potrf_ffi": lambda writer: _cholesky(writer, writer.config["lower"]),
            "solver_syevd_ffi": _eigenvalues,
        }.items()
        for library in ("cu", "hip")
    },
}
"""By the name of a call, the function that writes it: a tuple of all results, or the first one, of any dtype."""
