"""Calling conventions: from the arguments of a call to the flat arrays of an executable, and back."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from jaxlib import _jax

from stagec.core.messages.refusal import CallError
from stagec.core.sizes.avals import Aval, holds
from stagec.core.trees.same import same
from stagec.core.trees.tree import Tree, TreeMismatch, argument_path
from stagec.pjrt.arrays import DeviceArray, dtype_of, is_traced, to_numpy, unfit
from stagec.pjrt.executable import Executable
from stagec.pjrt.prepared import Kinds, Prepared
from stagec.pjrt.weights import Weight

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stagec.bundle.description import Description
    from stagec.core.messages.calls import Call
    from stagec.core.trees.node_types import NodeTypes, Seen
    from stagec.pjrt.static_data import StaticData


class Interface(NamedTuple):
    """A convention without an executable: for the loader to compile, or for a function before a size is known.

    The fields are those of a `Description`.
    """

    in_tree: Tree
    in_avals: tuple[Aval, ...]
    out_tree: Tree
    out_avals: tuple[Aval, ...]
    kept_var_idx: tuple[int, ...] = ()
    donated: tuple[bool, ...] = ()


Convention: TypeAlias = "Description | Interface"
"""How an executable is called."""


class _Omitted:
    """An argument that the caller leaves out, and the loader makes."""

    shape = ()


OMITTED = _Omitted()

_ARRAYS = {np.ndarray, DeviceArray}
_ARRAYS_OF_JAX = {*_ARRAYS, _jax.ArrayImpl}
NUMBERS = (bool, int, float, complex)
"""Python's numbers. Each is a number of the next kind too."""
_NARROWED = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}
"""JAX's conversions of 64-bit arrays in arguments, unless `jax_enable_x64` is set."""
_CONTAINERS = _jax.pytree.PyTreeRegistry()
"""jaxlib's own pytrees, in C++: of dicts, lists, tuples and namedtuples. It does not know JAX's registered types."""
_REGISTERED = _jax.pytree.default_registry()
"""The same with JAX's registered types, if this process has imported JAX."""
_MOST_STRUCTURES = 64
"""How many structures of arguments are remembered. Calls with more of them work too, without this path."""


class _Known(NamedTuple):
    """How arguments of a structure that was seen before are taken apart.

    order: for each leaf its index among jaxlib's leaves; None if `_flatten` must look each time.
    seen: the objects that gave results their static parts. static_data: of the nodes; None if it is not compared.
    static_leaves: jaxlib's leaves that are static, by number.
    """

    order: Sequence[int] | None
    seen: Seen | None = None
    static_data: StaticData | None = None
    static_leaves: tuple[tuple[int, Any], ...] = ()


class Signature:
    """One executable with its calling convention.

    name: of the function, for messages.
    usage: how to call it, for messages, which make it when they need it. Without it, `parameters` are its names.
    types: returns the types of this process, for trees with nodes of a model's own. None: those that it has imported.
    executable: missing until `load`, or until somebody sets a loaded one.
    registry: jaxlib's, to take arguments apart. out_structure: jaxlib's PyTreeDef of the result; None if it has a
        model's own types.
    unflatten: takes flat results and gives them in their structure; raises CallError ("structure") when a type of the
        model's own has another one here.
    """

    executable: Executable
    _types: NodeTypes  # missing without such nodes

    def __init__(
        self,
        name: str,
        description: Convention,
        types: Callable[[], NodeTypes] | None = None,
        usage: Callable[[], Call] | None = None,
        parameters: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._made_usage = usage
        self._parameters = parameters
        self.description = description
        self._orders: dict[Any, _Known] = {}
        structure = _structure_of(description.out_tree)
        self.out_structure = structure
        self.unflatten: Callable[[Sequence[Any]], Any] = self._unflatten if structure is None else structure.unflatten
        self._nodes_in, self._nodes_out = (
            list({(node.name, node.auxdata): node for node in tree.custom_nodes()}.values())
            for tree in (description.in_tree, description.out_tree)
        )
        if self._nodes_in or self._nodes_out:
            self._types = types() if types else _imported_types()
        self.registry = _REGISTERED if self._nodes_in else _CONTAINERS
        self._compares_types = any(map(_has_static_data, self._nodes_in))
        self.paths = [argument_path(path) for path in description.in_tree.paths()]
        self._dtypes = [dtype_of(aval) for aval in description.in_avals]

    def load(
        self,
        serialized: bytes | memoryview,
        custom_calls: Sequence[str],
        devices: Sequence[_jax.Device],
        memory_kinds: Mapping[int, str] | None = None,
    ) -> None:
        """Hand the executable to XLA. Raises LoadError ("custom-call", "executable").

        devices: as many as the executable is for. memory_kinds: see `Executable`.
        """
        known = self.description
        taken = [known.in_avals[i] for i in known.kept_var_idx]
        parameters, results = (
            [(tuple(map(int, aval.shape)), dtype_of(aval)) for aval in avals] for avals in (taken, known.out_avals)
        )
        donated = [known.donated[i] for i in known.kept_var_idx]
        self.executable = Executable.load(serialized, parameters, results, custom_calls, devices, memory_kinds, donated)

    @property
    def usage(self) -> Call:
        """How to call it: from its maker, else from its trees."""
        if self._made_usage:
            return self._made_usage()
        from stagec.core.messages.calls import Call  # calls that fit do without

        known = self.description
        trees = known.in_tree, known.in_avals, known.out_tree, known.out_avals
        return Call(self.name, *trees, self._parameters, donated=known.donated)

    def path(self, leaf: int) -> str:
        """Return the path of a leaf in the arguments, with the name of its parameter: `params['w']`."""
        return self.usage.path(self.paths[leaf])

    def flatten(self, args: tuple[object, ...], kwargs: dict[str, object]) -> list[Any]:
        """Return the leaves as numpy or device arrays of the right dtype. Raises CallError ("structure", "dtype")."""
        return self.check_dtypes(self.leaves(args, kwargs))

    def leaves(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Sequence[Any]:
        """Return the leaves as they are. Raises CallError ("structure").

        C++ takes apart containers that fitted in an earlier call. Only `_flatten` decides what fits.
        """
        try:
            leaves, structure = self.registry.flatten((args, kwargs))
            known = self._orders.get(structure)
        except (TypeError, ValueError, LookupError, RecursionError):
            # Keys that cannot be sorted; auxiliary data without a hash.
            return self._flatten(args, kwargs)
        if known is None:
            # A structure keeps its static data alive, so a caller must not make this dict grow without end.
            if len(self._orders) >= _MOST_STRUCTURES:
                return self._flatten(args, kwargs)
            if self._nodes_in:
                return self._learn(args, kwargs, leaves, structure)
            known = self._orders[structure] = _Known(self._order(structure))
        order = known.order
        is_checked = known.static_data is not None or known.static_leaves
        if order is None or (is_checked and not _is_same(known, leaves, structure)):
            return self._flatten(args, kwargs)
        if known.seen is not None:
            self._types.use(known.seen)
        return leaves if type(order) is range else [leaves[i] for i in order]

    def plain_leaves(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Sequence[Any] | None:
        """Return the leaves of arguments that fitted before, if jaxlib sees everything to compare; else None."""
        leaves, structure = self.registry.flatten((args, kwargs))
        known = self._orders.get(structure)
        if known is None or type(known.order) is not range or known.static_data or known.static_leaves:
            return None
        return leaves  # type: ignore[no-any-return]

    def _order(self, structure: Any) -> Sequence[int] | None:
        """Return for each leaf of the arguments its index among the leaves of `structure`; None if it does not fit."""
        # Numbers in place of the leaves show where `core/trees/tree.py` puts each. So that module alone has the rules
        # of trees, and C++ follows its order.
        numbers = range(structure.num_leaves)
        try:
            order = self.description.in_tree.flatten(structure.unflatten(numbers))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            # Not these containers, or a namedtuple of a class that takes no numbers.
            return None
        return numbers if order == [*numbers] else order

    def _learn(
        self, args: tuple[object, ...], kwargs: dict[str, object], leaves: Sequence[Any], structure: Any
    ) -> Sequence[Any]:
        """Return the leaves, and remember the number of each among C++'s leaves. Raises CallError ("structure")."""
        apart = self._apart(leaves, structure)  # before `_flatten`: the static parts of the last arguments are known
        own = self._flatten(args, kwargs)
        if apart is not None:
            from stagec.pjrt.static_data import StaticData  # few functions take such objects

            given, ordered = apart or (leaves, own)
            numbers = {id(leaf): i for i, leaf in enumerate(given)}
            order = [numbers.pop(id(leaf), -1) for leaf in ordered]
            self._orders[structure] = _Known(
                range(len(order)) if order == [*range(len(leaves))] else order if -1 not in order else None,
                self._types.seen(self._nodes_in) or None,
                StaticData.of(structure) if self._compares_types else None,
                # jaxlib treats fields of modules that are not arrays as leaves, but the function does not.
                tuple((i, leaves[i]) for i in numbers.values()),
            )
        return own

    def _apart(self, leaves: Sequence[Any], structure: Any) -> tuple[()] | tuple[Sequence[Any], Sequence[Any]] | None:
        """Return jaxlib's leaves and the function's with an object of its own at each position of a repeated leaf.

        Such a leaf does not identify its position. (): none has several. None: it cannot be done.
        """
        count = Counter(map(id, leaves))
        if len(count) == len(leaves):
            return ()
        # An array of one element seen in all places: it takes no memory, whatever the shape.
        given = [
            np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
            if count[id(leaf)] > 1 and hasattr(leaf, "shape") and hasattr(leaf, "dtype")
            else leaf
            for leaf in leaves
        ]
        if len({*map(id, given)}) < len(given):
            return None
        try:
            args, kwargs = structure.unflatten(given)
            return given, self._flatten(args, kwargs)
        except Exception:  # noqa: BLE001 - a type that a model registered may raise any
            return None

    def _flatten(self, args: tuple[object, ...], kwargs: dict[str, object]) -> list[Any]:
        try:
            types = self._types.of_arguments(self._nodes_in) if self._nodes_in else {}
            leaves = self.description.in_tree.flatten((args, kwargs), types=types)
        except TreeMismatch as error:
            raise CallError("structure", f"{self.name}: {self.usage.mismatch(error, kwargs)}") from None
        return leaves

    def check_dtypes(self, leaves: Sequence[Any], of_jax: bool = False) -> list[Any]:
        """Return flat arguments as numpy or device arrays of the right dtypes. Raises CallError ("dtype", "traced").

        64-bit arrays become 32-bit ones if the function takes those, unless JAX's `jax_enable_x64` is set: as in JAX. A
        Python number takes the dtype of the parameter, if it can hold the number.

        of_jax: whether JAX's arrays of the right dtypes stay unchanged.
        """
        arrays = _ARRAYS_OF_JAX if of_jax else _ARRAYS
        # Two passes in C are quicker than one in Python over hundreds of arrays.
        if {*map(type, leaves)} <= arrays and [leaf.dtype for leaf in leaves] == self._dtypes:
            return list(leaves)
        return [
            leaf
            if (type(leaf) in arrays or isinstance(leaf, DeviceArray)) and leaf.dtype == dtype
            else self._to_numpy(leaf, dtype, i, of_jax)
            for i, (leaf, dtype) in enumerate(zip(leaves, self._dtypes, strict=True))
        ]

    def _to_numpy(self, leaf: Any, dtype: np.dtype[Any], i: int, of_jax: bool) -> Any:
        if leaf is OMITTED or isinstance(leaf, Weight):
            return leaf
        aval = self.description.in_avals[i]
        if isinstance(leaf, NUMBERS) and not isinstance(leaf, np.generic):
            return self._of_number(leaf, dtype, i)
        given: Any = getattr(leaf, "dtype", "")
        if str(given).startswith("key<") and aval.dtype in (str(given), "u32"):  # the description may have its words
            # a caller who has such an array has imported JAX
            if hasattr(leaf, "words"):
                return leaf.words()
            words = sys.modules["jax"].random.key_data(leaf)
            return words if of_jax else np.asarray(words)
        if is_traced(leaf):
            what = f"{self.name}: {self.path(i)} is traced by JAX, and an executable takes values: call "
            raise CallError("traced", f"{what}stagec.jax.function(bundle, {self.name!r}) there instead")
        if what := unfit(leaf):
            raise CallError("dtype", f"{self.name}: {self.path(i)} is {what}; expected {dtype} ({aval})")
        values = leaf if str(given).startswith("key<") else np.asarray(leaf)
        if _NARROWED.get(values.dtype.name) == dtype.name and not _x64_enabled():
            # JAX narrows without a word too: a number beyond float32 is inf there.
            with np.errstate(over="ignore", invalid="ignore"):
                return values.astype(dtype)
        if values.dtype != dtype:
            has = given or values.dtype
            raise CallError("dtype", f"{self.name}: {self.path(i)} has dtype {has}; expected {dtype} ({aval})")
        return values

    def _of_number(self, value: Any, dtype: np.dtype[Any], i: int) -> NDArray[Any]:
        """Return a Python number as an array of `dtype`: an integer becomes a float, a float no integer, as in JAX."""
        aval = self.description.in_avals[i]
        # A bool is an int for Python, and an array of bools for JAX: the first kind that fits counts.
        given = next(rank for rank, kind in enumerate(NUMBERS) if isinstance(value, kind))
        wanted = 2 if aval.dtype == "bf16" else {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}.get(aval.dtype[0], -1)
        if given > wanted:
            name = NUMBERS[given].__name__
            raise CallError("dtype", f"{self.name}: {self.path(i)} is a Python {name}; expected {dtype} ({aval})")
        try:
            if wanted != 1 or holds(aval.dtype, int(value)):
                with np.errstate(over="ignore"):
                    return np.array(NUMBERS[wanted](value), dtype)
        except OverflowError:  # an integer beyond all floats
            pass
        raise CallError("dtype", f"{self.name}: {self.path(i)} is a number that {dtype} cannot hold ({aval})")

    def call(self, leaves: Sequence[Any], donate: bool = True) -> Sequence[Any]:
        """Return the flat results: numpy arrays, or device arrays when an argument is one.

        donate: whether device arrays of donated arguments are consumed; otherwise the executable gets copies of them.
        """
        outputs = self.call_on_device(leaves, donate)
        return outputs if DeviceArray in map(type, leaves) else to_numpy(outputs)

    def call_on_device(self, leaves: Sequence[Any], donate: bool = True) -> list[DeviceArray]:
        """Return the flat results as device arrays for all kinds of arguments. Raises CallError ("deleted")."""
        return self.executable.run(self.buffers(leaves, donate))

    def buffers(self, leaves: Sequence[Any], donate: bool = True) -> list[_jax.ArrayImpl]:
        """Return the parameters of the executable on the right devices. Raises CallError ("deleted")."""
        executable, donated = self.executable, self.description.donated
        buffers = []
        for number, i in enumerate(self.description.kept_var_idx):
            own = leaf = leaves[i]
            if isinstance(leaf, Weight):
                own = leaf.on(executable.parameters[number])
                if donated[i]:  # every call uses it, and its memory may be the file's
                    own = own.copy()
            elif isinstance(leaf, DeviceArray):
                if leaf.is_deleted():
                    raise self.deleted(i)
                # The executable takes the memory of a donated argument, whatever a call wants: the aliases are in its
                # module. So it gets a copy to take.
                if donated[i] and not donate:
                    own = leaf.copy()
            buffers.append(executable.put(number, own, donated[i]))
        return buffers

    def deleted(self, leaf: int) -> CallError:
        """Return the error for a leaf that is gone."""
        what = f"{self.name}: {self.path(leaf)} was donated to an earlier call; pass that call's result"
        return CallError("deleted", what)

    def prepare(self, kinds: Kinds, donate: bool = True) -> Prepared | None:
        """Return a faster path for all leaves of `kinds`, after a successful call; None if there is none."""
        known = self.description
        return Prepared.for_kinds(self.executable, kinds, known.kept_var_idx, known.donated, donate)

    def _unflatten(self, outputs: Sequence[Any]) -> Any:
        try:
            types = self._types.of_results(self._nodes_out) if self._nodes_out else {}
            return self.description.out_tree.unflatten(outputs, types)
        except TreeMismatch as error:
            raise CallError("structure", f"{self.name}: the result: {error.what}") from None


def _imported_types() -> NodeTypes:
    from stagec.core.trees.node_types import NodeTypes  # most trees have plain containers alone

    return NodeTypes()


def _x64_enabled() -> bool:
    """Return whether 64-bit arrays stay 64-bit: JAX's setting; if JAX is not imported, its default."""
    config = getattr(sys.modules.get("jax"), "config", None)  # it may be in the middle of its import
    return bool(getattr(config, "jax_enable_x64", False))


def _is_same(known: _Known, leaves: Sequence[Any], structure: Any) -> bool:
    """Whether the static parts of a call equal those of the known call, because jaxlib compares with `==`."""
    if known.static_data is not None and not known.static_data.same(structure):
        return False
    return all(leaves[i] is value or same(leaves[i], value) for i, value in known.static_leaves)


def _has_static_data(node: Tree) -> bool:
    """Whether a custom node has data beside children that jaxlib compares with `==`."""
    if fields := node.fields:
        return bool(fields.static)
    keyed = node.keyed
    return keyed is None or keyed.static not in ({}, {"fields": {}}, {"aux": None})


def _structure_of(tree: Tree) -> Any:
    """Return jaxlib's form of a tree of plain containers; None for others, and if its leaves have another order."""
    if any(True for _ in tree.custom_nodes()):
        return None
    numbers = range(tree.num_leaves)
    # C++ sorts the keys of a dict, and the description may have another order: then it would give results to the wrong
    # names.
    leaves, structure = _CONTAINERS.flatten(tree.unflatten(numbers))
    return structure if leaves == [*numbers] else None
