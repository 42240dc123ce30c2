"""The table: each field, method and parameter of JAX's stages, and how stagec's is compared with it.

A row's check is given the same program staged by both, and raises AssertionError where they differ.
`docs/conformance.md` is written from these rows.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np

import stagec
from tests.conformance.programs import Program, mesh_of, programs


class Staged:
    """One program staged by JAX (`theirs_...`) and by stagec (`ours_...`), each stage made when it is asked for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.theirs = jax.jit(program.function, **program.options)
        self.ours = stagec.jit(program.function, **program.options)

    @cached_property
    def theirs_traced(self) -> Any:
        return self.theirs.trace(*self.program.args)

    @cached_property
    def ours_traced(self) -> Any:
        return self.ours.trace(*self.program.args)

    @cached_property
    def theirs_lowered(self) -> Any:
        return self.theirs.lower(*self.program.args)

    @cached_property
    def ours_lowered(self) -> Any:
        return self.ours.lower(*self.program.args)

    @cached_property
    def theirs_compiled(self) -> Any:
        return self.theirs_lowered.compile()

    @cached_property
    def ours_compiled(self) -> Any:
        return self.ours_lowered.compile()

    @cached_property
    def theirs_exported(self) -> Any:
        return jax.export.export(self.theirs, platforms=["cpu"])(*self.program.args)

    @cached_property
    def ours_exported(self) -> Any:
        return stagec.Exported.deserialize(bytes(self.theirs_exported.serialize()))

    def arguments(self) -> Any:
        """Arguments of their own for a call: it may donate them."""
        return jax.tree.map(np.array, self.program.args)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    """`Class.member`, or `jit(parameter)`."""
    compared: str
    """What is compared, for a reader."""
    check: Callable[[Staged], None]


def bits(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of every leaf."""
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [(str(array.dtype), array.shape, array.tobytes()) for array in arrays]


def paths(structure: Any) -> list[str]:
    """The path of each leaf of JAX's structure, as `Tree.paths` writes them."""
    leaves = jax.tree.unflatten(structure, range(structure.num_leaves))
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(leaves)]


def equal(ours: Any, theirs: Any) -> None:
    assert ours == theirs


def same_tree(ours: Any, theirs: Any) -> None:
    assert list(ours.paths()) == paths(theirs)


def info(tree: Any) -> list[tuple[tuple[int, ...], str, bool]]:
    """Shape, dtype and donation of each leaf of `args_info`."""
    return [(tuple(leaf.shape), str(leaf.dtype), bool(leaf.donated)) for leaf in jax.tree.leaves(tree)]


def same_figures(ours: dict[str, float], theirs: dict[str, float]) -> None:
    for name in ("flops", "bytes accessed", "transcendentals"):
        assert ours.get(name, ours.get(name.replace(" ", "_"))) == theirs.get(name)


def traced(staged: Staged) -> tuple[Any, Any]:
    return staged.ours_traced, staged.theirs_traced


def lowered(staged: Staged) -> tuple[Any, Any]:
    return staged.ours_lowered, staged.theirs_lowered


def compiled(staged: Staged) -> tuple[Any, Any]:
    return staged.ours_compiled, staged.theirs_compiled


def exported(staged: Staged) -> tuple[Any, Any]:
    return staged.ours_exported, staged.theirs_exported


def row(name: str, compared: str, stage: Callable[[Staged], tuple[Any, Any]], check: Callable[[Any, Any], None]) -> Row:
    """A row whose check is given one stage of both."""
    return Row(name, compared, lambda staged: check(*stage(staged)))


def field_row(stage: Callable[[Staged], tuple[Any, Any]], name: str) -> Row:
    """A field that is equal."""
    member = name.partition(".")[2]
    return row(name, "equal", stage, lambda ours, theirs: equal(getattr(ours, member), getattr(theirs, member)))


def _same_structures(ours: Any, theirs: Any) -> None:
    same_tree(ours.in_tree, theirs.in_tree)
    same_tree(ours.out_tree, theirs.out_tree)


def _same_avals(ours: Any, theirs: Any) -> None:
    from jax._src.dtypes import short_dtype_name

    for name in ("in_avals", "out_avals"):
        found = [(aval.dtype, tuple(map(str, aval.shape))) for aval in getattr(ours, name)]
        assert found == [(short_dtype_name(a.dtype), tuple(map(str, a.shape))) for a in getattr(theirs, name)]


def _operations(text: str) -> list[str]:
    """The operations that StableHLO text names, in order. A portable artifact has its constants first: not counted."""
    return [name for name in re.findall(r"stablehlo\.\w+", text) if name != "stablehlo.constant"]


def _same_stablehlo(ours: Any, theirs: Any) -> None:
    text = ours.as_text()
    assert text == ours.as_text(dialect="stablehlo")
    assert _operations(text) == _operations(theirs.as_text())
    assert "loc(" in ours.as_text(debug_info=True)
    assert "loc(" not in text


def _same_hlo(ours: Any, theirs: Any) -> None:
    counts = [Counter(re.findall(r" = \S+ (\w[\w-]*)\(", stage.as_text(dialect="hlo"))) for stage in (ours, theirs)]
    assert counts[0] == counts[1]


def _same_ir(ours: Any, theirs: Any) -> None:
    assert type(ours.compiler_ir()) is type(theirs.compiler_ir())
    assert type(ours.compiler_ir("hlo")) is type(theirs.compiler_ir("hlo"))


def _same_memory(ours: Any, theirs: Any) -> None:
    for name in ("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes"):
        assert getattr(ours.memory_analysis(), name) == getattr(theirs.memory_analysis(), name)


def _same_optimized(ours: Any, theirs: Any) -> None:
    kinds = [Counter(re.findall(r" = \S+ (\w[\w-]*)\(", stage.as_text())) for stage in (ours, theirs)]
    assert kinds[0] == kinds[1]


def _same_placements(ours: Any, theirs: Any) -> None:
    for name in ("input_shardings", "output_shardings", "input_formats", "output_formats"):
        mine, other = (jax.tree.leaves(getattr(stage, name), is_leaf=lambda x: x is None) for stage in (ours, theirs))
        assert len(mine) == len(other)


def _same_shardings_hlo(ours: Any, theirs: Any) -> None:
    for name in ("in_shardings_hlo", "out_shardings_hlo"):
        assert list(map(str, getattr(ours, name))) == list(map(str, getattr(theirs, name)))


def _jaxpr(ours: Any, theirs: Any) -> None:
    assert str(ours.jaxpr) == str(theirs.jaxpr)


def _calls(staged: Staged) -> None:
    wanted = bits(staged.theirs(*staged.arguments()))
    assert bits(staged.ours(*staged.arguments())) == wanted
    assert bits(staged.ours_compiled(*staged.arguments())) == wanted
    assert bits(staged.ours_exported.call(*staged.arguments())) == wanted
    assert bits(staged.ours_traced.lower(platforms=("cpu",)).compile()(*staged.arguments())) == wanted


def _round_trips(staged: Staged) -> None:
    written = staged.ours_exported.serialize()
    theirs = jax.export.deserialize(bytearray(written))
    _same_avals(stagec.Exported.deserialize(written), theirs)
    assert theirs.mlir_module_serialized == staged.theirs_exported.mlir_module_serialized
    again = stagec.Compiled.deserialize(staged.ours_compiled.serialize())
    assert bits(again(*staged.arguments())) == bits(staged.theirs(*staged.arguments()))


def _runtime(ours: Any, theirs: Any) -> None:
    assert type(ours.runtime_executable()).__name__ == "LoadedExecutable"
    assert len(ours.runtime_executable().hlo_modules()) == len(theirs.runtime_executable().hlo_modules())


def _same_info(ours: Any, theirs: Any) -> None:
    assert info(ours.args_info) == info(theirs.args_info)


def _same_costs(ours: Any, theirs: Any) -> None:
    same_figures(ours.cost_analysis(), theirs.cost_analysis())


ROWS = (
    Row(
        "Wrapped(), Compiled(), Exported.call, Traced.lower, Lowered.compile",
        "results, bit for bit",
        _calls,
    ),
    row("Wrapped.trace, Traced.jaxpr", "text of the jaxpr", traced, _jaxpr),
    field_row(traced, "Traced.fun_name"),
    row("Traced.in_tree, Traced.out_tree", "paths of the leaves", traced, _same_structures),
    row("Traced.args_info", "shape, dtype, donation", traced, _same_info),
    row(
        "Wrapped.lower, Lowered.as_text(stablehlo, debug_info)",
        "operations in order, but for constants",
        lowered,
        _same_stablehlo,
    ),
    row("Lowered.as_text(hlo)", "operations by kind", lowered, _same_hlo),
    row("Lowered.compiler_ir", "types of the modules", lowered, _same_ir),
    row("Lowered.in_tree, Lowered.out_tree", "paths of the leaves", lowered, _same_structures),
    row("Lowered.args_info", "shape, dtype, donation", lowered, _same_info),
    row(
        "Lowered.cost_analysis",
        "flops, bytes, transcendentals",
        lowered,
        _same_costs,
    ),
    row("Compiled.as_text", "operations by kind", compiled, _same_optimized),
    row(
        "Compiled.cost_analysis",
        "flops, bytes, transcendentals",
        compiled,
        _same_costs,
    ),
    row("Compiled.memory_analysis", "bytes by use", compiled, _same_memory),
    row("Compiled.runtime_executable", "kind and number of modules", compiled, _runtime),
    row("Compiled.in_tree, Compiled.out_tree", "paths of the leaves", compiled, _same_structures),
    row(
        "Compiled.args_info",
        "shape, dtype, donation",
        compiled,
        _same_info,
    ),
    row(
        "Compiled.input_shardings, output_shardings, input_formats, output_formats",
        "one for each leaf",
        compiled,
        _same_placements,
    ),
    Row(
        "Exported.serialize, deserialize; Compiled.serialize, deserialize",
        "read by JAX; results",
        _round_trips,
    ),
    *(
        field_row(exported, f"Exported.{name}")
        for name in (
            "fun_name",
            "nr_devices",
            "platforms",
            "ordered_effects",
            "unordered_effects",
            "disabled_safety_checks",
            "mlir_module_serialized",
            "calling_convention_version",
            "module_kept_var_idx",
            "uses_global_constants",
        )
    ),
    row("Exported.in_tree, Exported.out_tree", "paths of the leaves", exported, _same_structures),
    row("Exported.in_avals, Exported.out_avals", "dtypes and shapes", exported, _same_avals),
    row("Exported.in_shardings_hlo, Exported.out_shardings_hlo", "XLA's text", exported, _same_shardings_hlo),
    row(
        "Exported.mlir_module",
        "operations in order",
        exported,
        lambda o, t: equal(_operations(o.mlir_module()), _operations(t.mlir_module())),
    ),
)
"""Members, compared on every program of SAMPLE."""

SAMPLE = ("mlp", "while", "cholesky", "donation", "unused argument", "nested tree", "zero size", "psum on 4 devices")


@dataclass(frozen=True)
class Parameter:
    """A parameter of `jit`: options for both, and arguments; results and `args_info` must be equal."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: Callable[[], dict[str, Any]]
    kwargs: dict[str, Any] = field(default_factory=dict)


def _x(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def _rows(axis: str | None) -> Any:
    return jax.sharding.NamedSharding(mesh_of({"d": 4}), jax.sharding.PartitionSpec(axis))


def _power(x: Any, n: int) -> Any:
    for _ in range(n):
        x = x * 1.5
    return x


PARAMETERS = (
    Parameter(
        "in_shardings", lambda x, y: x @ y, (_x(8, 4), _x(4, 4)), lambda: {"in_shardings": (_rows("d"), _rows(None))}
    ),
    Parameter("out_shardings", lambda x: x * 2, (_x(8, 4),), lambda: {"out_shardings": _rows("d")}),
    Parameter("static_argnums", _power, (_x(4), 3), lambda: {"static_argnums": 1}),
    Parameter("static_argnames", _power, (_x(4),), lambda: {"static_argnames": "n"}, {"n": 2}),
    Parameter("donate_argnums", lambda s, x: (s + x, x), (_x(4), _x(4)), lambda: {"donate_argnums": (0,)}),
    Parameter("donate_argnames", lambda state, x: state + x, (_x(4), _x(4)), lambda: {"donate_argnames": ("state",)}),
    Parameter("keep_unused", lambda x, y: x + 1, (_x(4), _x(5)), lambda: {"keep_unused": True}),
    Parameter("inline", jax.numpy.tanh, (_x(4),), lambda: {"inline": True}),
    Parameter(
        "compiler_options",
        lambda x: jax.numpy.exp(x).sum(),
        (_x(64),),
        lambda: {"compiler_options": {"xla_cpu_enable_fast_math": True}},
    ),
)
"""The parameters of `jit`."""

REFUSED = ("device", "backend", "abstracted_axes")
"""Parameters of jax.jit that mean nothing ahead of time."""


def as_markdown() -> str:
    """Return docs/conformance.md."""
    lines = [
        "# Conformance",
        "",
        "What `import stagec` offers under the names of `jax.jit`, `jax.stages` and `jax.export`, and how each is",
        "compared with JAX's own. Written by `python -m tests.conformance.members`; the tests below",
        "`tests/conformance` make each comparison, for the same inputs, and fail where results differ.",
        "",
        "## Members",
        "",
        f"Each row is checked on {len(SAMPLE)} programs: {', '.join(SAMPLE)}.",
        "",
        "| member | compared |",
        "| --- | --- |",
        *(f"| `{row.name}` | {row.compared} |" for row in ROWS),
        "",
        "## Parameters of `jit`",
        "",
        "| parameter | compared |",
        "| --- | --- |",
        *(f"| `{parameter.name}` | results, bit for bit; `args_info` |" for parameter in PARAMETERS),
        *(f"| `{name}` | refused, with what to write instead |" for name in REFUSED),
        "",
        "## Programs",
        "",
        "Each program runs through `jit`, `lower().compile()`, a serialized `Compiled`, an artifact of `jax.export`",
        "called here, and an artifact written here called by `jax.export`. Results are `jax.jit`'s, bit for bit.",
        "",
        *(f"- {name}" for name in programs()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path("docs/conformance.md").write_text(as_markdown(), encoding="utf-8")
