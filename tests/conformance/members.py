"""The table: each field and method of JAX's stages, and what stagec's is compared by.

A row's view takes a program staged by JAX, or by stagec; what it returns must be equal.
`docs/conformance.md` is written from these rows, the parameters of `jit` and the manifest's keys.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.export

import stagec
from stagec.frontends.common.jit import JAXS_OWN
from stagec.stages import mlir
from tests.conformance import views
from tests.conformance.array_programs import as_markdown as arrays_as_markdown
from tests.conformance.keys import as_markdown as keys_as_markdown
from tests.conformance.on_target import digests
from tests.conformance.operations import as_markdown as operations_as_markdown
from tests.conformance.pairs import as_markdown as pairs_as_markdown
from tests.conformance.programs import mesh_of, parameters, programs
from tests.conformance.staged import Staged, call

View = Callable[[Any], Any]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    name: `Class.member`, with its arguments.
    compared: what is compared, for a reader.
    view: of a `Staged`, what must be equal.
    programs: names of the programs; empty for all.
    without: programs for which there is nothing to compare.
    """

    name: str
    compared: str
    view: Callable[[Staged], Any]
    programs: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def applies(self, program: str) -> bool:
        return program not in self.without and program in (self.programs or (program,))


NO_DERIVATIVE = ("while",)
FUSED = ("mlp", "attention", "scan", "flax")
MEASURED = ("mlp", "attention", "conv", "sort", "rng", "dot", "bf16", "zero size", "nested tree", "flax")

EVALUATED = ("mlp", "scan")

STRUCTURE = (views.STRUCTURE, views.nodes)
AVALS = (f"structure; {views.AVALS}", views.tree_of_avals)
OUT_INFO = ("structure; shape, dtype, layout and XLA's form of the sharding of each result", views.out_info)
DONATED = ("equal", tuple)
INFO = ("structure; shape, dtype and donation of each argument", views.info)
NUMBERS = ("every number", dict)
OPTIMIZED = "text, but for the order of keys"
RESULTS = "results, bit for bit"
PORTABLE = "portable text"
PLACEMENT = "structure; XLA's form and memory of each sharding"
FORMAT = "structure; fields of each layout; XLA's form of each sharding"
NAMED = "spec and memory of each sharding; names, sizes and types of its mesh's axes"
READ_BY_JAX = "read by JAX: every field"


def fields(stage: str, **views: tuple[str, View]) -> list[Row]:
    """A row for each field, or method without arguments: what is compared, and the view of its value."""

    def value(name: str, view: View, staged: Staged) -> Any:
        found = getattr(getattr(staged, stage.lower()), name)
        return view(found() if callable(found) else found)

    return [Row(f"{stage}.{name}", words, partial(value, name, view)) for name, (words, view) in views.items()]


def _effects(staged: Staged) -> list[str]:
    return sorted(type(effect).__name__ for effect in getattr(staged.traced, "effects", staged.traced.jaxpr.effects))


def _shapes(staged: Staged) -> Any:
    return views.shapes(staged.wrapped.eval_shape(*staged.args, **staged.program.kwargs))


def _traced_again(staged: Staged) -> tuple[int, int]:
    """How often the function is traced in two calls, and after one more."""
    traced: list[None] = []

    def counted(*args: Any) -> Any:
        traced.append(None)
        return staged.program.function(*args)

    wrapped = staged.jit(counted)
    wrapped(*staged.args), wrapped(*staged.args)
    before = len(traced)
    wrapped.clear_cache()
    wrapped(*staged.args)
    return before, len(traced)


def _called(staged: Staged) -> Any:
    compiled = staged.compiled
    returned = type(compiled).call(compiled._params, *staged.args, **staged.program.kwargs)
    return list(map(views.bits, returned))


def _lowered_for(platform: str, staged: Staged) -> str:
    return views.portable(staged.lower(platform).as_text())


def _exported(view: View, staged: Staged) -> Any:
    return view(staged.exported)


def _compiled_with(staged: Staged) -> Any:
    compiled = staged.lowered.compile({"xla_disable_hlo_passes": "fusion"})
    text = views.optimized(compiled.as_text())
    # The option has an effect.
    return text, text != views.optimized(staged.compiled.as_text()), staged.results(compiled)


def _reloaded(staged: Staged) -> Any:
    compiled = staged.compiled
    if staged.side == "ours":
        compiled = stagec.Compiled.deserialize(compiled.serialize())
    return views.info(compiled.args_info), views.statistics(compiled.memory_analysis()), staged.results(compiled)


def _module(staged: Staged) -> Any:
    with mlir.make_context():  # JAX's wants one
        return views.module(staged.exported.mlir_module(serialized=False))


def _over(staged: Staged) -> jax.sharding.Mesh:
    """The mesh of the program."""
    return mesh_of(staged.program.mesh or {"x": 1})


def _read_by_jax(vjp_order: int, staged: Staged) -> Any:
    read = jax.export.deserialize(bytearray(staged.exported.serialize(vjp_order=vjp_order)))
    return views.fields(read, vjp_order)


def _runs_in_jax(staged: Staged) -> Any:
    read = jax.export.deserialize(bytearray(staged.exported.serialize()))
    run = partial(call, read, mesh=staged.program.mesh)
    return views.fields(read), read.has_vjp(), staged.results(lambda *args, **kwargs: run(args, kwargs))


def _deserialized(staged: Staged) -> Any:
    read = staged.read_jaxs
    return views.fields(read), read.has_vjp(), staged.results(partial(staged.run, read))


ROWS = (
    Row("Wrapped.__call__", RESULTS, lambda s: s.results(s.wrapped)),
    Row("Wrapped.trace", f"lowered and compiled: {RESULTS}", lambda s: s.results(s.traced.lower().compile())),
    Row("Wrapped.lower", f"compiled: {RESULTS}", lambda s: s.results(s.compiled)),
    Row("Wrapped.eval_shape", "structure; shape and dtype of each result", _shapes),
    Row("Wrapped.clear_cache", "how often the function is traced, before and after", _traced_again, ("scalars",)),
    *fields(
        "Traced",
        jaxpr=("text", str),
        fun_name=("equal", str),
        in_tree=STRUCTURE,
        out_tree=STRUCTURE,
        args_info=INFO,
        in_avals=AVALS,
        out_avals=AVALS,
        out_info=OUT_INFO,
        donate_argnums=DONATED,
    ),
    Row("Traced.effects", "class of each", _effects),  # since JAX 0.11
    Row("Traced.__call__", RESULTS, lambda s: s.results(s.traced), EVALUATED),
    *(
        Row(
            f"Traced.lower(platforms=({platform!r},))",
            PORTABLE,
            partial(_lowered_for, platform),
        )
        for platform in ("cpu", "cuda", "tpu")
    ),
    *fields(
        "Lowered",
        in_tree=STRUCTURE,
        out_tree=STRUCTURE,
        args_info=INFO,
        in_avals=AVALS,
        out_info=OUT_INFO,
        donate_argnums=DONATED,
        cost_analysis=NUMBERS,
    ),
    Row("Lowered.as_text()", PORTABLE, lambda s: views.portable(s.lowered.as_text())),
    Row("Lowered.as_text(dialect='stablehlo')", PORTABLE, lambda s: views.portable(s.lowered.as_text("stablehlo"))),
    Row(
        "Lowered.as_text(debug_info=True)",
        f"{PORTABLE}; names in locations",
        lambda s: views.portable(s.lowered.as_text(debug_info=True), debug_info=True),
    ),
    Row("Lowered.as_text(dialect='hlo')", "text", lambda s: s.lowered.as_text("hlo")),
    Row("Lowered.as_text(dialect='hlo', debug_info=True)", "text", lambda s: s.lowered.as_text("hlo", debug_info=True)),
    Row(
        "Lowered.compiler_ir(dialect='stablehlo')",
        f"class; {PORTABLE}",
        lambda s: views.module(s.lowered.compiler_ir("stablehlo")),
    ),
    Row("Lowered.compiler_ir(dialect='hlo')", "class; text", lambda s: views.computation(s.lowered.compiler_ir("hlo"))),
    Row("Lowered.compile()", OPTIMIZED, lambda s: views.optimized(s.compiled.as_text())),
    Row("Lowered.compile(compiler_options)", f"{OPTIMIZED}; {RESULTS}", _compiled_with, FUSED),
    Row(
        "Lowered.compile(target)",
        f"{RESULTS}, with JAX's for the same CPU",
        lambda s: digests(s.side, MEASURED)[s.name],
        MEASURED,
    ),
    Row("Compiled.__call__", RESULTS, lambda s: s.results(s.compiled)),
    Row("Compiled.call", "result, its leaves and the arguments' leaves, bit for bit", _called),
    *fields(
        "Compiled",
        in_tree=STRUCTURE,
        out_tree=STRUCTURE,
        args_info=INFO,
        in_avals=AVALS,
        out_info=OUT_INFO,
        donate_argnums=DONATED,
        as_text=(OPTIMIZED, views.optimized),
        cost_analysis=NUMBERS,
        memory_analysis=("every number", views.statistics),
        runtime_executable=("class, devices, names of modules", views.executable),
    ),
    Row("Compiled.input_shardings", PLACEMENT, lambda s: views.placements(s.compiled.input_shardings, s.ndims(True))),
    Row(
        "Compiled.output_shardings", PLACEMENT, lambda s: views.placements(s.compiled.output_shardings, s.ndims(False))
    ),
    Row("Compiled.input_formats", FORMAT, lambda s: views.formats(s.compiled.input_formats, s.ndims(True))),
    Row("Compiled.output_formats", FORMAT, lambda s: views.formats(s.compiled.output_formats, s.ndims(False))),
    Row("Compiled.serialize", f"read again: `args_info`, memory, {RESULTS}", _reloaded),
    *(Row(f"Exported.{name}", words, partial(_exported, view)) for name, (words, view) in views.FIELDS.items()),
    *fields("Exported", has_vjp=("equal", bool)),
    Row("Exported.call", RESULTS, lambda s: s.results(partial(s.run, s.exported))),
    Row("Exported.vjp", f"its {RESULTS}", lambda s: s.cotangents(s.exported), without=NO_DERIVATIVE),
    Row("Exported.mlir_module()", "text with locations", lambda s: s.exported.mlir_module()),
    Row(
        "Exported.mlir_module(serialized=False)",
        "class; text",
        _module,
    ),
    Row("Exported.in_shardings_jax(mesh)", NAMED, lambda s: views.named(s.exported.in_shardings_jax(_over(s)))),
    Row("Exported.out_shardings_jax(mesh)", NAMED, lambda s: views.named(s.exported.out_shardings_jax(_over(s)))),
    Row("Exported.serialize(vjp_order=0)", f"{READ_BY_JAX}; {RESULTS}, in JAX", _runs_in_jax),
    *(
        Row(
            f"Exported.serialize(vjp_order={n})",
            f"{READ_BY_JAX}, at each order",
            partial(_read_by_jax, n),
            (),
            NO_DERIVATIVE,
        )
        for n in (1, 2)
    ),
    Row(
        "Exported.deserialize",
        f"of JAX's bytes: every field; {RESULTS}",
        _deserialized,
    ),
)
"""Members."""

_OF_ARRAYS = (
    *("Wrapped.eval_shape", "Exported.has_vjp"),
    *("Traced.fun_name", "Traced.in_tree", "Traced.out_tree", "Traced.args_info", "Traced.donate_argnums"),
    *("Traced.in_avals", "Traced.out_avals"),
    *("Lowered.in_tree", "Lowered.out_tree", "Lowered.args_info", "Lowered.in_avals", "Lowered.out_info"),
    *(f"Exported.{name}" for name in views.FIELDS if name != "mlir_module_serialized"),
)
OF_ARRAYS = tuple(row for row in ROWS if row.name in _OF_ARRAYS)
"""The rows that are compared for functions of arrays: all before XLA compiles, except JAX's own strings."""

OF_PARAMETERS = (
    "Wrapped.__call__",
    "Traced.jaxpr",
    "Lowered.args_info",
    "Lowered.as_text()",
    "Lowered.compile()",
    "Compiled.input_shardings",
    "Compiled.output_shardings",
)
"""The rows that are compared for each parameter of `jit`."""

OF_EXPORT = {
    "DisabledSafetyCheck": "JAX's own, for `Traced.export(disabled_checks=...)`; in the manifest `disabled_checks`",
    "Exported": "`stagec.Exported`",
    "SymbolicScope": "the manifest's `constraints`; `Traced.export` takes JAX's own",
    "default_export_platform": '`Traced.export` is for `"cpu"` unless you name platforms: stagec looks for no device',
    "deserialize": "`stagec.Exported.deserialize`",
    "export": "`stagec.jit(f).trace(...).export(platforms)`; JAX's own takes `stagec.jit(f)` too",
    "is_symbolic_dim": "a symbolic size of an aval is a `str`, another one an `int`",
    "maximum_supported_calling_convention_version": "10, and an artifact of another version is refused by name",
    "minimum_supported_calling_convention_version": "9, as above",
    "register_namedtuple_serialization": "not needed: stagec describes named tuples itself",
    "register_pytree_node_serialization": "JAX's own; stagec writes and reads the names that you registered",
    "symbolic_args_specs": "JAX's own, or a manifest's `avals`",
    "symbolic_dim_bounds": "JAX's own, for sizes in JAX's avals; a manifest's `constraints` say the bounds",
    "symbolic_shape": "JAX's own; without JAX `stagec_arrays.symbolic_shape`",
}
"""Each member of `jax.export`, of all releases, and what stagec has in its place."""
OF_STAGES = ("ArgInfo", "Compiled", "CompilerOptions", "Lowered", "Traced", "Wrapped")
"""Each member of `jax.stages`. CompilerOptions is a type for checkers: a dict."""

REFUSED = ("device", "backend", "abstracted_axes")
"""Parameters of jax.jit that mean nothing ahead of time."""


_DIFFERS = """\
## Where stagec does not do as `jax.jit`

XLA of some jaxlibs makes programs for CPUs that end their process, or give wrong numbers without a word. stagec
looks for them in each optimized program, compiles such a program again with the option that avoids the defect,
and says so: the build prints a warning, the description has `avoided`, and `inspect`, `diff` and `report`
show it. This also holds for golden results, and for what the loader compiles. `jax.jit` itself is not changed.

| issue | releases | what XLA does | the option |
| --- | --- | --- | --- |
| jax#40412, jax#39257 | 0.10.2, 0.11.0 | it ends the process or gives wrong numbers where it leaves arrays of \
seven or more dimensions to YNNPACK | `xla_cpu_experimental_ynn_fusion_type = ""` |
| jax#39103 | 0.10.1, 0.10.2 | it gives wrong numbers where it leaves a reduction of a matrix product to YNNPACK: \
`jax.vmap(lambda row: jnp.sum((m @ row) ** 2))` over more than 16,384 rows of float64, or 32,768 of float32 | \
`xla_cpu_experimental_ynn_fusion_type = ""` |

Such a program has the last bits of `jax.jit` with this option. If your own `compiler_options` set it to another value,
stagec refuses the program, with the issue. A report that `jnp.arctan` is wrong (jax#39352) is not in the table: nobody
could reproduce it, and `tests/conformance/test_arctan.py` looks for it.
""".splitlines()
"""Where stagec is better: tests/backends/test_defects.py."""


def as_markdown() -> str:
    """Return docs/conformance.md."""
    every = programs()
    lines = [
        "# Conformance",
        "",
        "stagec has members with the names of `jax.jit`, `jax.stages` and `jax.export`. This page lists them, and",
        "how the tests in `tests/conformance` compare each with JAX's. The tests use the same inputs on both sides,",
        "have no tolerance, and fail if anything differs. At their end they print these rows, with the number of",
        "comparisons that agree. They leave source files and lines out of a module's locations, because these",
        "depend on the caller. `python -m tests.conformance.members` writes this page.",
        "",
        "## Compare your own functions",
        "",
        "    stagec compare-jit out/models.aot models/models.toml [FUNCTION ...]",
        "",
        "calls each executable for CPUs on random arguments, and the function under `jax.jit`, and compares the bits.",
        "The status is 1 where one differs. JAX's client is made where XLA sees the CPU of the target, as when stagec",
        "compiles. `XLA_FLAGS=--xla_cpu_max_isa=AVX2` is not that CPU: XLA keeps features of the machine that are",
        "beyond the level, so some functions have other last bits there. Threads at run time matter too:",
        "one executable of the gradient of a convolution by its kernel gives other bits with 1, 2 and 8 threads",
        "(`NPROC`), and so on machines with other numbers of cores. The command gives both sides the target's",
        "`parallelism`. So `jax.jit` on your machine may have other last bits than an executable for a smaller CPU.",
        "",
        "Numbers that a model computes while it is imported, such as tables, are in the artifact as the build",
        "computed them: on [one CPU for all builds](reproducibility.md#what-a-model-computes). The command imports",
        "the model where XLA sees the CPU of the target, so such constants may differ in the last bits.",
        "",
        *_DIFFERS,
        "",
        "## Members",
        "",
        f"The tests compare each member on {len(every)} programs (the list at the end), or on as many as the row says.",
        "",
        "| member | compared | programs |",
        "| --- | --- | --- |",
        *(f"| `{row.name}` | {row.compared} | {sum(map(row.applies, every))} |" for row in ROWS),
        "",
        '"Portable text" is the text of a StableHLO module after serialization and deserialization. stagec\'s',
        "modules have made this trip; the tests send JAX's modules on it. The trip puts constants first, writes",
        "defaults out and replaces the operations of CHLO. XLA prints the keys of a backend configuration in any",
        "order; the tests sort them. Some fields are empty for these programs (effects, checks, further platforms);",
        "the manifest's keys below fill them.",
        "",
        "Some members have fewer programs:",
        "",
        f"- derivatives: JAX cannot differentiate {', '.join(NO_DERIVATIVE)} in reverse;",
        f"- compiler options: the tested option changes only {', '.join(FUSED)};",
        f"- a named target: the tests compile {', '.join(MEASURED)}, each in a separate process;",
        f"- calls of a jaxpr: JAX evaluates {', '.join(EVALUATED)};",
        "- tracing again: one program is enough.",
        "",
        "stagec's classes have all members of JAX's classes; of a `Traced` that JAX made,",
        f"{', '.join(f'`{name}`' for name in JAXS_OWN)} give JAX's own objects.",
        "A test looks for other members in the JAX that runs it.",
        "",
        "## Names of `jax.export`",
        "",
        "| name | in stagec |",
        "| --- | --- |",
        *(f"| `{name}` | {instead} |" for name, instead in OF_EXPORT.items()),
        "",
        "## Parameters of `jit`",
        "",
        f"For each parameter, the tests compare {', '.join(f'`{name}`' for name in OF_PARAMETERS)}, as above.",
        "",
        "| parameter | compared |",
        "| --- | --- |",
        *(f"| `{name}` | {len(OF_PARAMETERS)} members |" for name in parameters()),
        *(f"| `{name}` | stagec refuses it, and says what to write instead |" for name in REFUSED),
        "",
        *keys_as_markdown(),
        *pairs_as_markdown(),
        *operations_as_markdown(),
        *arrays_as_markdown(),
        "Before anything is compiled, these members are compared too, as above:",
        f"{', '.join(f'`{row.name}`' for row in OF_ARRAYS)}.",
        "",
        "## Programs",
        "",
        *(f"- {name}" for name in every),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # some programs are for four devices
    Path("docs/conformance.md").write_text(as_markdown(), encoding="utf-8")
