"""What JAX's values and stagec's are compared by: each function takes either, and returns the same for equal ones."""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.dtypes import short_dtype_name
from jax._src.effects import Effect
from jaxlib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from jaxlib.xla_client import HloSharding

from stagec.core.trees.tree import Tree
from stagec.stages import mlir
from stagec.stages.shardings import GSPMDSharding, Mesh, NamedSharding, SingleDeviceSharding

Bits = list[tuple[str, tuple[int, ...], bytes]]

STRUCTURE = "kind, keys and children of every node"
AVALS = "dtype and dimensions of each"
HLO = "XLA's text of each; of JAX's named shardings where JAX leaves these out"


def bits(tree: Any) -> Bits:
    """Dtype, shape and bytes of every leaf; a PRNG key is its words, float0 is bool."""
    return [(str(array.dtype), array.shape, array.tobytes()) for array in map(words, jax.tree.leaves(tree))]


def words(leaf: Any) -> np.ndarray[Any, Any]:
    """A leaf as stagec's calls take it and return it."""
    dtype = getattr(leaf, "dtype", None)
    if dtype == jax.dtypes.float0:
        return np.zeros(leaf.shape, np.bool_)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def nodes(tree: Any) -> Any:
    """Kind, keys and children of every node: a `Tree` or a PyTreeDef, in the JSON form of a `Tree`."""
    if isinstance(tree, Tree):
        return tree.to_json()
    if tree.node_data() is None:
        return "*"
    kind, auxdata = tree.node_data()
    children = list(map(nodes, tree.children()))
    if kind is type(None):
        return None
    if kind is list:
        return children
    if kind is tuple:
        return {"tuple": children}
    assert kind is dict
    return {"dict": dict(zip(auxdata, children, strict=True))}


def info(args_info: Any) -> Any:
    """Structure of `args_info`, and of each leaf shape, dtype and donation."""
    leaves, structure = jax.tree.flatten(args_info)
    return structure, [(tuple(leaf.shape), np.dtype(leaf.dtype), bool(leaf.donated)) for leaf in leaves]


def shapes(tree: Any) -> Any:
    """Structure of a tree; shape and dtype of each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves]


def avals(listed: Any) -> list[tuple[str, tuple[str, ...]]]:
    """Short dtype and dimensions of each aval."""

    def dtype(aval: Any) -> str:
        if isinstance(aval.dtype, str):
            return aval.dtype
        return "f0" if aval.dtype == jax.dtypes.float0 else short_dtype_name(aval.dtype)

    return [(dtype(aval), tuple(str(dim).replace(" ", "") for dim in aval.shape)) for aval in listed]


def tree_of_avals(tree: Any) -> Any:
    """Structure of a tree of avals; dtype and dimensions of each."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, avals(leaves)


def out_info(tree: Any) -> Any:
    """Structure of `out_info`; of each leaf shape, dtype, fields of its layout and XLA's form of its sharding."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [
        (tuple(leaf.shape), np.dtype(leaf.dtype), _layout(leaf.format.layout), placed(leaf.sharding, len(leaf.shape)))
        for leaf in leaves
    ]


def texts(listed: Any) -> list[str]:
    """Each value as text; of an effect its class."""
    return [str(type(value) if isinstance(value, Effect) else value) for value in listed]


def named(shardings: Any) -> list[Any]:
    """Of each NamedSharding its spec and memory, and name, size and type of each axis of its mesh; None of None."""
    return [None if s is None else (_entries(s.spec), s.memory_kind, _axes(s.mesh)) for s in shardings]


def _entries(spec: Any) -> Any:
    entries = getattr(spec, "partitions", spec)
    split = [[entry] if isinstance(entry, str) else list(entry or ()) for entry in entries]
    return split, sorted(spec.unreduced), sorted(spec.reduced)


def _axes(mesh: Any) -> list[tuple[str, int, str]]:
    described = Mesh.from_jax(mesh)
    return list(zip(described.axis_names, described.axis_sizes, described.axis_types, strict=True))


def placed(sharding: Any, ndim: int) -> Any:
    """XLA's form of a sharding, as text."""
    if sharding is None:
        return None
    match sharding:
        case SingleDeviceSharding():
            return str(HloSharding.replicate())
        case GSPMDSharding():
            return str(HloSharding.from_string(sharding.hlo_sharding))
        case NamedSharding():
            return str(sharding.to_hlo(ndim))
    return str(sharding._to_xla_hlo_sharding(ndim))


def placements(tree: Any, ndims: list[int]) -> Any:
    """Structure of a tree of shardings, XLA's form and memory of each; None for an argument that is dropped."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    used = iter(ndims)
    # JAX names the device's own memory.
    return structure, [leaf and (placed(leaf, next(used)), leaf.memory_kind or "device") for leaf in leaves]


def formats(tree: Any, ndims: list[int]) -> Any:
    """Structure of a tree of formats, and of each the fields of its layout and XLA's form of its sharding."""
    leaves, structure = jax.tree.flatten(tree)
    layouts = [_layout(leaf.layout) for leaf in leaves]
    used = iter(ndims)
    return structure, layouts, [placed(leaf.sharding, next(used)) if leaf.layout else None for leaf in leaves]


def _layout(layout: Any) -> Any:
    names = ("major_to_minor", "tiling", "sub_byte_element_size_in_bits")
    return layout and [getattr(layout, name) for name in names]


def statistics(stats: Any) -> dict[str, int]:
    """Every number of XLA's memory statistics, by name."""
    return {name: value for name in dir(stats) if isinstance(value := getattr(stats, name), int)}


def executable(loaded: Any) -> Any:
    """Class of jaxlib's executable, its devices, and its modules by name."""
    return type(loaded), len(loaded.local_devices()), [module.name for module in loaded.hlo_modules()]


def optimized(text: str) -> str:
    """HLO text whose backend configurations have their keys in one order: XLA prints them in any."""
    decoder, parts, end = json.JSONDecoder(), [], 0
    for found in re.finditer(r'backend_config=(?={")', text):
        config, stop = decoder.raw_decode(text, found.end())
        parts += [text[end : found.end()], json.dumps(config, sort_keys=True)]
        end = stop
    return "".join([*parts, text[end:]])


def portable(module: Any, debug_info: bool = False) -> str:
    """The text of a StableHLO module (or its text) after a trip through an exported artifact.

    stagec's modules have made it: it puts constants first, writes defaults out, and names the kind of export.
    """
    week_4 = stablehlo.StablehloCompatibilityRequirement.WEEK_4
    version = stablehlo.get_version_from_compatibility_requirement(week_4)
    with mlir.make_context() as context, ir.Location.unknown(context):
        parsed = ir.Module.parse(str(module))
        artifact = _jax.mlir.serialize_portable_artifact(parsed, version, True)
        parsed = mlir.read_artifact(context, artifact)
        if "jax.uses_shape_polymorphism" in parsed.operation.attributes:
            del parsed.operation.attributes["jax.uses_shape_polymorphism"]
        # JAX 0.12 writes this default of top_k, but not when it lowers for an export.
        return str(parsed.operation.get_asm(enable_debug_info=debug_info)).replace("is_stable = true, ", "")


def module(found: Any) -> Any:
    """Class and portable text of an MLIR module."""
    return type(found), portable(found)


def computation(module: Any) -> Any:
    """Class and text of an XlaComputation."""
    return type(module), str(module.as_hlo_module().to_string())


def shardings_hlo(which: str, exported: Any) -> list[str]:
    """XLA's form of each sharding, as text; from JAX's named ones, where JAX leaves this field empty."""
    found = getattr(exported, f"{which}_shardings_hlo")
    named = getattr(exported, f"_{which}_named_shardings", found)
    ndims = [len(aval.shape) for aval in getattr(exported, f"{which}_avals")]
    return [str(hlo or placed(sharding, ndim)) for hlo, sharding, ndim in zip(found, named, ndims, strict=True)]


FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "fun_name": ("equal", lambda e: e.fun_name),
    "in_tree": (STRUCTURE, lambda e: nodes(e.in_tree)),
    "in_avals": (AVALS, lambda e: avals(e.in_avals)),
    "out_tree": (STRUCTURE, lambda e: nodes(e.out_tree)),
    "out_avals": (AVALS, lambda e: avals(e.out_avals)),
    "in_shardings_hlo": (HLO, partial(shardings_hlo, "in")),
    "out_shardings_hlo": (HLO, partial(shardings_hlo, "out")),
    "nr_devices": ("equal", lambda e: e.nr_devices),
    "platforms": ("equal", lambda e: tuple(e.platforms)),
    "ordered_effects": ("class of each", lambda e: texts(e.ordered_effects)),
    "unordered_effects": ("class of each", lambda e: texts(e.unordered_effects)),
    "disabled_safety_checks": ("text of each", lambda e: texts(e.disabled_safety_checks)),
    "mlir_module_serialized": ("bytes", lambda e: bytes(e.mlir_module_serialized)),
    "calling_convention_version": ("equal", lambda e: e.calling_convention_version),
    "module_kept_var_idx": ("equal", lambda e: tuple(e.module_kept_var_idx)),
    "uses_global_constants": ("equal", lambda e: e.uses_global_constants),
}
"""The fields of an `Exported`: what is compared, and the view of it."""


def fields(exported: Any, vjp_order: int = 0) -> list[dict[str, Any]]:
    """Every field of an `Exported`, and of its vector-Jacobian products up to an order."""
    found = {name: view(exported) for name, (_, view) in FIELDS.items()}
    return [found, *(fields(exported.vjp(), vjp_order - 1) if vjp_order else ())]
