"""How many operations an instruction of an optimized program takes.

A multiplication and an addition are two; what other instructions do for an element is one, and transcendental functions
(exp, tanh, sqrt ...) are none, as XLA counts (xla/service/hlo_cost_analysis.cc). A multiplication of complex numbers is
four. Nothing is counted for padding.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence

from stagec.costs import hlo
from stagec.costs.hlo import Instruction

_ELEMENTWISE = frozenset(
    (
        *("abs", "add", "and", "bitcast-convert", "ceil", "clamp", "clz", "compare", "complex", "convert"),
        *("count-leading-zeros", "divide", "floor", "imag", "is-finite", "maximum", "minimum", "multiply"),
        *("negate", "not", "or", "popcnt", "real", "reduce-precision", "remainder", "round-nearest-afz"),
        *("round-nearest-even", "select", "shift-left", "shift-right-arithmetic", "shift-right-logical"),
        *("sign", "stochastic-convert", "subtract", "xor"),
    )
)
_DIMENSIONS = re.compile(r" dimensions=\{(\d*)")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([^}\]]*)')
_LABELS = re.compile(r" dim_labels=(\w*)_(\w*)->(\w*)")
_GROUPS = tuple(re.compile(rf" {kind}_group_count=(\d+)") for kind in ("feature", "batch"))
_WINDOW = re.compile(r" window=\{([^}]*)\}")
_LENGTHS = re.compile(r" fft_length=\{([\d,]*)\}")
MULTIPLIED = ("dot", "ragged-dot", "scaled-dot", "convolution", "custom-call")
"""Opcodes of products and convolutions, also those of a library."""
TARGET = re.compile(r' custom_call_target="([^"]*)"')
_ESTIMATE = re.compile(r'"cost_estimate":\{([^}]*)\}')
SHARDINGS = frozenset(("SPMDFullToShardShape", "SPMDShardToFullShape", "Sharding"))
"""Custom calls that annotate shardings: compiling removes them."""
NAMES = SHARDINGS | {"AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast", "GatherScatterIndicesBitpacked"}
"""Custom calls that say something of an array: they compute nothing, and move nothing either."""
NOTHING = NAMES.union(
    ("AsyncCollectiveDone", "AsyncCollectiveStart", "MoveToDevice", "MoveToHost", "PinToDevice", "PinToDeviceSram"),
    ("X64Combine", "X64SplitHigh", "X64SplitLow", "annotate_device_placement"),
    ("cu_lu_pivots_to_permutation", "hip_lu_pivots_to_permutation"),
)
"""Custom calls that compute nothing: they name, place or join arrays."""
_GEMM = ("__cublas$gemm", "__cublas$lt$matmul")
_CONVOLUTION = {"Forward": (0, 1, -1), "BackwardInput": (-1, 1, 0), "BackwardFilter": (0, -1, 1)}
"""cuDNN's convolutions: which operand is the input, the kernel and the output of the forward one; -1 is the result."""
_FACTORIZATION = re.compile(r"(?:lapack_[sdcz]|(?:cu|hip)solver_)(potrf|getrf|geqrf|orgqr|ungqr|trsm)_ffi")
_OTHER_NAMES = {
    "Cholesky": "potrf",
    "CompactWyHelper": "trtri",
    "InvertDiagBlocksLowerTriangular": "trtri",
    "InvertDiagBlocksUpperTriangular": "trtri",
    "LuDecompositionBlock": "getrf",
    "QrDecompositionBlock": "geqrf",
    "__cublas$triangularSolve": "trsm",
}
"""XLA:TPU's steps of factorizations and solutions, and cuBLAS's, by LAPACK's names."""


def flops(instruction: Instruction, operands: Sequence[str], applied: Callable[[], int | None]) -> int | None:
    """Return the operations of an instruction, without its called computations; None if they are not known.

    operands: their types. applied: gives those of the computation that a reduction applies to an element.
    """
    opcode, result = instruction.operation, instruction.result
    if opcode in _ELEMENTWISE:
        return _elements(result)
    match opcode:
        case "dot" | "ragged-dot" | "scaled-dot":
            return _contraction(instruction, operands[0], result)
        case "convolution":
            return _convolution(instruction, operands[0], operands[1], result)
        case "reduce":
            # Of n elements that become one, n - 1 are applied to another.
            return _times(applied(), _elements(operands[0]) - _elements(result))
        case "map" | "scatter":
            # The updates are the last third of the operands, but for the indices.
            updates = operands[(len(operands) + 1) // 2] if opcode == "scatter" else result
            return _times(applied(), _elements(updates))
        case "reduce-window":
            return _times(applied(), _windowed(instruction, operands[0], result))
        case "select-and-scatter":
            return math.prod(_window(instruction, "size")) * _elements(operands[1])
        case "all-reduce":
            return sum(_elements(array) for array in hlo.elements(result))
        case "sort":
            along = _DIMENSIONS.search(instruction.attributes)
            size = hlo.dims(operands[0])[int(along[1])] if along and along[1] else 1
            return _elements(operands[0]) * max(size - 1, 0).bit_length()
        case "fft":
            return _fft(instruction, operands[0], result)
        case "triangular-solve":
            return hlo.dims(operands[0])[-1] * _elements(operands[1]) * _parts(result)
        case "cholesky":
            return _matrix("potrf", operands)
        case "custom-call":
            return _custom_call(instruction, operands)
    return 0


def _custom_call(instruction: Instruction, operands: Sequence[str]) -> int | None:
    match = TARGET.search(instruction.attributes)
    target, result = match[1] if match else "", next(iter(hlo.elements(instruction.result)), "")
    if target in NOTHING:
        return 0
    if target.startswith(_GEMM):
        return _contraction(instruction, operands[0], result)
    if target.startswith("__cudnn$conv"):
        arrays = [*operands, result]
        for kind, (input_, kernel, output) in _CONVOLUTION.items():
            if kind in target:
                return _convolution(instruction, arrays[input_], arrays[kernel], arrays[output])
    if target.endswith("TopK"):
        return _elements(operands[0])
    estimated = estimate(instruction, "flops")
    if estimated is not None:
        return estimated
    factorization = _FACTORIZATION.fullmatch(target)
    name = factorization[1] if factorization else _OTHER_NAMES.get(target, "")
    return _matrix(name, operands) if name else None


def estimate(instruction: Instruction, name: str) -> int | None:
    """Return the author's estimate for a Pallas kernel for TPUs (`cost_estimate`); None if there is none.

    name: "flops" or "bytes_accessed".
    """
    match = _ESTIMATE.search(instruction.attributes)
    number = re.search(rf'"{name}":"?(\d+)', match[1]) if match else None
    return int(number[1]) if number else None


def _matrix(name: str, operands: Sequence[str]) -> int:
    """LAPACK's counts for a factorization of m x n matrices, or for a solution (LAPACK working note 41, appendix C)."""
    *batch, m, n = hlo.dims(operands[0])
    count, k = math.prod(batch) * _parts(operands[0]), min(m, n)
    if name in ("potrf", "trtri"):
        return count * n * n * n // 3
    if name == "trsm":
        return n * _elements(operands[1]) * _parts(operands[1])
    triangular = 2 * m * n * k - (m + n) * k * k + 2 * k * k * k // 3
    return count * triangular * (1 if name == "getrf" else 2)


def _contraction(instruction: Instruction, left: str, result: str) -> int:
    match = _CONTRACTED.search(instruction.attributes)
    contracted = [int(axis.strip('" ')) for axis in match[1].split(",") if axis] if match else []
    width = math.prod(hlo.dims(left)[axis] for axis in contracted)
    return 2 * width * _elements(result) * _parts(result)


def _convolution(instruction: Instruction, left: str, right: str, result: str) -> int | None:
    labels = _LABELS.search(instruction.attributes)
    if labels is None:
        return None
    input_ = dict(zip(labels[1], hlo.dims(left), strict=True))
    kernel = dict(zip(labels[2], hlo.dims(right), strict=True))
    output = dict(zip(labels[3], hlo.dims(result), strict=True))
    positions = 1
    for axis, parts in enumerate(_dimensions(instruction, sum(name.isdigit() for name in labels[1]))):
        name = str(axis)
        positions *= _positions(input_[name], kernel[name], output[name], *parts)
    features, batches = (
        int(group_count[1]) if group_count else 1 for group_count in (p.search(instruction.attributes) for p in _GROUPS)
    )
    channels: int = input_["f"] // features * output["f"] * (input_["b"] // batches)
    return 2 * channels * positions * _parts(result)


def _windowed(instruction: Instruction, operand: str, result: str) -> int:
    """How many pairs of elements a reduction over windows of an array takes together."""
    sizes = _window(instruction, "size")
    every = zip(hlo.dims(operand), sizes, hlo.dims(result), _dimensions(instruction, len(sizes)), strict=True)
    axes = [
        (input_, output, _positions(input_, size, output, *rest)) for input_, size, output, rest in every if size > 1
    ]
    rest = _elements(result) // math.prod(output for _, output, _ in axes)
    if all(positions == input_ * output for input_, output, positions in axes):
        # Each window has all of the array: it is reduced once.
        return rest * (math.prod(input_ for input_, _, _ in axes) - 1)
    return rest * math.prod(positions for _, _, positions in axes) - _elements(result)


@functools.lru_cache(maxsize=1024)
def _positions(input_: int, kernel: int, output: int, stride: int, low: int, spread: int, dilation: int) -> int:
    """For one dimension of a window: how many pairs of its elements and positions are about an element of the input.

    low: elements of padding before the input. spread: distance of elements of the input. dilation: of the window's.
    """
    step = math.gcd(stride, spread)
    period, count = spread // step, 0
    for at in range(kernel):
        begin = at * dilation - low  # where the window's element is at the first position
        if begin % step:
            continue
        # Positions are those where begin + position * stride is a multiple of spread, in the input.
        first = -(begin // step) * pow(stride // step, -1, period) % period if period > 1 else 0
        least = max(-(begin // stride), 0)
        most = min(((input_ - 1) * spread - begin) // stride, output - 1)
        count += max((most - first) // period - (least - first - 1) // period, 0)
    return count


def _dimensions(instruction: Instruction, count: int) -> list[tuple[int, int, int, int]]:
    """For each dimension of a window: stride, padding before, and the spread of the input and of the window."""
    strides, spreads, dilations = (_window(instruction, name) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    pads = [int(pad.partition("_")[0]) for pad in _entries(instruction, "pad")] or [0] * count
    return list(zip(*(column or [1] * count for column in (strides, pads, spreads, dilations)), strict=True))


def _window(instruction: Instruction, name: str) -> list[int]:
    """An entry of a window for each of its dimensions; 1 for all where it is left out, empty without a window."""
    sizes = _entries(instruction, "size")
    return [int(number) for number in _entries(instruction, name)] or [1] * len(sizes)


def _entries(instruction: Instruction, name: str) -> list[str]:
    window = _WINDOW.search(instruction.attributes)
    entries = dict(entry.split("=") for entry in window[1].split()) if window else {}
    return entries[name].split("x") if name in entries else []


def _fft(instruction: Instruction, operand: str, result: str) -> int:
    """5 n log2(n) of a complex transform, half of it of a real one (https://www.fftw.org/speed/method.html)."""
    lengths = _LENGTHS.search(instruction.attributes)
    whole = math.prod(int(length) for length in lengths[1].split(",") if length) if lengths else 1
    real = next((side for side in (operand, result) if not hlo.is_complex(side)), "")
    return int((2.5 * _elements(real) if real else 5 * _elements(operand)) * math.log2(max(whole, 1)))


def _times(flops: int | None, count: int) -> int | None:
    return None if flops is None and count > 0 else (flops or 0) * max(count, 0)


def _elements(type_: str) -> int:
    return math.prod(hlo.dims(type_))


def _parts(type_: str) -> int:
    """How many multiplications of real numbers one of an array's elements is."""
    return 4 if hlo.is_complex(type_) else 1
