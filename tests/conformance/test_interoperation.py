"""What stagec's pipeline builds from each key of a manifest runs in JAX, and what JAX exports runs here."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.export import _export as jax_export

import stagec
from stagec.core.sizes.avals import DTYPES, Aval
from stagec.core.sizes.size import evaluate
from stagec.stages.lowering import lower_exported
from stagec.stages.mlir import to_bytecode
from tests.building import ROOT, checked, write_specs
from tests.conformance.keys import Key, keys, manifest
from tests.conformance.models import Module, Struct
from tests.conformance.pairs import crossed
from tests.conformance.programs import mesh_of
from tests.conformance.staged import call
from tests.conformance.views import Bits, bits, fields, portable, words
from tests.zoo import nodes, zoo

KEYS = (*keys(), *crossed())
pytestmark = pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)


@pytest.fixture(autouse=True)
def row(key: Key, record_property: Callable[[str, object], None]) -> None:
    record_property("row", f"key: {key.name}")


@pytest.fixture(scope="module", autouse=True)
def types_of_models() -> Iterator[None]:
    """Register the models' types for JAX, as a reader of artifacts without stagec would; for these tests alone."""
    registries = (jax_export.serialization_registry, jax_export.deserialization_registry)
    before = [dict(registry) for registry in registries]
    jax.export.register_namedtuple_serialization(zoo.Point, serialized_name="tests.zoo.zoo:Point")
    register(zoo.Cloud, unit="m")
    register(nodes.Gauge)
    register(nodes.Unit, name="m")
    register(Struct, mode="train")
    register(Module, scale=0.5)
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()  # type: ignore[attr-defined]
        registry.update(entries)  # type: ignore[attr-defined]


def register(kind: Any, **static: object) -> None:
    """Register a class whose fields are its children, but for the static ones, which have these values."""
    names = [field.name for field in dataclasses.fields(kind) if field.name not in static]

    def write(auxdata: Any) -> bytes:
        return json.dumps({"fields": names, "static": static}, sort_keys=True, separators=(",", ":")).encode()

    def build(aux_data: Any, children: Sequence[Any]) -> Any:
        value = object.__new__(kind)
        for name, child in [*zip(names, children, strict=True), *aux_data["static"].items()]:
            object.__setattr__(value, name, child)
        return value

    jax.export.register_pytree_node_serialization(
        kind,
        serialized_name=f"{kind.__module__}:{kind.__qualname__}",
        serialize_auxdata=write,
        deserialize_auxdata=json.loads,
        from_children=build,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Key], bytes]:
    """The artifact of a key: planned and exported by the commands, as the rules do it. One manifest has them all."""
    root = tmp_path_factory.mktemp("keys")
    (root / "keys.toml").write_text(manifest(KEYS))
    exports = write_specs("keys.toml", root, root)["exports"]
    names = {(export["spec"]["name"], export["spec"]["variant"]): export["name"] for export in exports}

    def build(key: Key) -> bytes:
        if key.stablehlo:
            lowered = jitted(key).lower(*key.args)
            (root / key.stablehlo).write_bytes(
                lowered.as_text().encode() if key.stablehlo.endswith(".mlir") else to_bytecode(lowered.compiler_ir())
            )
        name = names[f"f{[other.name for other in KEYS].index(key.name)}", key.variant]
        roots = ("--import-root", root, "--import-root", ROOT)
        checked("action", "export", "--spec", f"{name}.spec", "--output", f"{name}.exported", *roots, cwd=root)
        return (root / f"{name}.exported").read_bytes()

    done: dict[str, bytes] = {}
    return lambda key: done[key.name] if key.name in done else done.setdefault(key.name, build(key))


@pytest.fixture(autouse=True)
def settings(key: Key) -> Iterator[None]:
    """What a manifest says of a whole process, said to JAX."""
    with ExitStack() as said:
        said.enter_context(jax.enable_x64(key.enable_x64))
        said.enter_context(jax.default_matmul_precision(key.matmul_precision))
        said.enter_context(jax.default_prng_impl(key.prng_impl))
        if "prng_impl" in key.manifest:
            jax.clear_caches()  # JAX 0.10.1 does not look at this setting when it knows a function
        yield


def jitted(key: Key) -> Any:
    return jax.jit(key.function, **key.jit)


@pytest.fixture(scope="module")
def written() -> Callable[[Key], bytearray]:
    """What `jax.export` writes of a key's function, with its vector-Jacobian products."""
    done: dict[str, bytearray] = {}

    def write(key: Key) -> bytearray:
        with in_context(key):
            exported = jax.export.export(jitted(key), **{"platforms": ["cpu"], **key.export})(*key.args, **key.kwargs)
            return done.setdefault(key.name, exported.serialize(vjp_order=key.vjp_order))

    return lambda key: done.get(key.name) or write(key)


@pytest.fixture(scope="module")
def expected(written: Callable[[Key], bytearray]) -> Callable[[Key], list[Bits]]:
    """What `jax.jit` gives for each of the sizes, and then each vector-Jacobian product that JAX exports."""
    done: dict[str, list[Bits]] = {}

    def run(key: Key) -> list[Bits]:
        given = [arguments(key, sizes) for sizes in key.sizes]
        results = [bits(jitted(key)(*args, **kwargs)) for args, kwargs in given]
        results += derivatives(key, jax.export.deserialize(written(key)), call_of_jax)
        return done.setdefault(key.name, results)

    return lambda key: done.get(key.name) or run(key)


def in_context(key: Key) -> Any:
    """The mesh of the manifest."""
    return jax.sharding.use_abstract_mesh(mesh_of(dict(key.mesh)).abstract_mesh) if key.mesh else nullcontext()


def values(avals: Any, sizes: Mapping[str, int], whole: bool = False) -> Any:
    """Arrays for a tree of avals, their dimensions of these sizes; what is not an aval stays.

    whole: of whole numbers, which add up to the same in every order.
    """
    rng = np.random.default_rng(0)

    def value(aval: Any) -> Any:
        if not hasattr(aval, "shape"):
            return aval
        if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
            return jax.random.key(7, impl=aval.dtype._impl.name)
        shape = [evaluate(str(dim), sizes) for dim in aval.shape]
        drawn = np.asarray(rng.integers(-2, 3, size=shape) if whole else rng.normal(size=shape))
        if aval.dtype == jax.dtypes.float0:
            return np.zeros(drawn.shape, bool)
        # A Python number is weakly typed.
        return jnp.asarray(float(drawn)) if aval.weak_type else drawn.astype(aval.dtype)

    return jax.tree.map(value, avals)


def arguments(key: Key, sizes: Mapping[str, int]) -> Any:
    # JAX's call of an artifact splits a program otherwise than jax.jit, and adds in another order.
    return values((key.args, key.kwargs), sizes, whole=bool(key.mesh))


def call_of_jax(exported: Any, args: Any, kwargs: Any, mesh: Mapping[str, int], sizes: Mapping[str, int]) -> Any:
    return call(exported, args, kwargs, dict(mesh))


def derivatives(key: Key, exported: Any, run: Callable[..., Any]) -> list[Bits]:
    """Results of the vector-Jacobian product of each order, for the first sizes."""
    found = []
    for _ in range(key.vjp_order):
        exported = exported.vjp()
        avals = [aval_of_jax(aval) for aval in exported.in_avals]
        given = values(tuple(avals), key.sizes[0], whole=bool(key.mesh))
        found.append(bits(run(exported, given, {}, key.mesh, key.sizes[0])))
    return found


def aval_of_jax(aval: Any) -> Any:
    """An aval of either side with JAX's dtype."""
    if not isinstance(aval, Aval):
        return aval
    dtype = jax.dtypes.float0 if aval.dtype == "f0" else DTYPES[aval.dtype].numpy_name
    return SimpleNamespace(shape=aval.shape, dtype=jnp.dtype(dtype), weak_type=False)


def outcomes(key: Key, exported: Any, run: Callable[..., Any]) -> list[Bits]:
    """What an artifact gives, as `expected`."""
    static = {name for name, value in key.kwargs.items() if not hasattr(value, "shape")}
    results = []
    for sizes in key.sizes:
        args, kwargs = arguments(key, sizes)
        positional = tuple(value for i, value in enumerate(args) if i != key.jit.get("static_argnums"))
        named = {name: value for name, value in kwargs.items() if name not in static}
        results.append(bits(run(exported, positional, named, key.mesh, sizes)))
    return [*results, *derivatives(key, exported, run)]


def plain(exported: Any, args: Any, kwargs: Any) -> Any:
    """Arguments as stagec's calls take them without the model's types."""
    return exported.in_tree.unflatten(list(map(words, jax.tree.leaves((args, kwargs)))))


def call_of_stagec(exported: Any, args: Any, kwargs: Any, mesh: Mapping[str, int], sizes: Mapping[str, int]) -> Any:
    args, kwargs = plain(exported, args, kwargs)
    return exported.call(*args, **kwargs)


def compiled(exported: Any, args: Any, kwargs: Any, mesh: Mapping[str, int], sizes: Mapping[str, int]) -> Any:
    """Lowered for this machine's CPU and these sizes, compiled, written and read again."""
    args, kwargs = plain(exported, args, kwargs)
    executable = lower_exported(exported, "cpu", sizes).compile()
    return stagec.Compiled.deserialize(executable.serialize())(*args, **kwargs)


def test_jax_reads_what_stagec_builds(
    key: Key, built: Callable[[Key], bytes], expected: Callable[[Key], list[Bits]]
) -> None:
    assert outcomes(key, jax.export.deserialize(bytearray(built(key))), call_of_jax) == expected(key)


@pytest.mark.parametrize("run", [call_of_stagec, compiled], ids=["called", "compiled"])
def test_stagec_reads_what_jax_exports(
    key: Key, run: Callable[..., Any], written: Callable[[Key], bytearray], expected: Callable[[Key], list[Bits]]
) -> None:
    exported = stagec.Exported.deserialize(written(key))
    assert outcomes(key, exported, run) == expected(key)


def test_both_artifacts_say_the_same(
    key: Key, built: Callable[[Key], bytes], written: Callable[[Key], bytearray]
) -> None:
    ours, theirs = stagec.Exported.deserialize(built(key)), stagec.Exported.deserialize(written(key))
    ours_fields, theirs_fields = (fields(exported, key.vjp_order) for exported in (ours, theirs))
    if key.module == "text":
        for found, exported in ((ours_fields, ours), (theirs_fields, theirs)):
            found[0]["mlir_module_serialized"] = portable(exported.mlir_module())
    if key.stablehlo:  # what another framework wrote has the version that stagec was made for, not this JAX's
        assert ours_fields[0].pop("calling_convention_version") <= theirs_fields[0].pop("calling_convention_version")
    assert ours_fields == theirs_fields


def test_what_stagec_traces_is_what_jax_exports(
    key: Key, written: Callable[[Key], bytearray], expected: Callable[[Key], list[Bits]]
) -> None:
    wrapped = stagec.jit(key.function, **key.jit)
    with in_context(key):
        ours = fields(wrapped.trace(*key.args, **key.kwargs).export(**key.export), key.vjp_order)
    assert ours == fields(stagec.Exported.deserialize(written(key)), key.vjp_order)
    args, kwargs = arguments(key, key.sizes[0])
    assert bits(wrapped(*args, **kwargs)) == expected(key)[0]


def test_each_platform_of_an_artifact_can_be_lowered(key: Key, written: Callable[[Key], bytearray]) -> None:
    exported = stagec.Exported.deserialize(written(key))
    for _ in range(key.vjp_order + 1):
        for platform in exported.platforms:
            lowered = lower_exported(exported, platform, key.sizes[0])
            assert "_platform_index" not in lowered.as_text()
            assert lowered.as_text("hlo").startswith("HloModule")
        if exported.has_vjp():
            exported = exported.vjp()
