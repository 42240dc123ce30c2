"""All patches of JAX and Python during the tracing of a model: the object, the reason, and the end of the need.

A change holds inside a `with` statement, for the thread that entered it or for all. The attribute is replaced when
the first thread enters and put back when the last one leaves, under one lock: threads that trace at once leave nothing
behind. The replacement checks the settings of the calling thread. Standard library only.

`jax.export` takes rules that lower an operation in another way (`_override_lowering_rules`). They replace none of these
patches: a rule cannot call the one that it replaces, nor see where the operation was bound; and what it leaves out
stays among the effects of the artifact (tests/frontends/test_patched.py).
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import gc
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

_LOCK = threading.RLock()
_MODIFIED = ctypes.pythonapi.PyType_Modified
"""Looked up here, before `reads` listens, because `reads` cannot see a model's look-ups in native code."""


class Patch:
    """An attribute that stagec replaces for a while."""

    def __init__(self, owner: str, name: str, why: str, until: str = "", everywhere: bool = False) -> None:
        """Name the object to replace; this changes nothing yet.

        owner: "module" or "module:Class" that has it. name: of the attribute, a function or a method.
        why: the fault without it.
        until: a piece of JAX's sources: the first release that does not have it may need no patch, and
            `tools/known_builds.py names` says so; "" if no known change makes it superfluous.
        everywhere: whether the change holds for all threads, and not only for the one that enters it.
        """
        self.owner, self.name, self.why, self.until, self.everywhere = owner, name, why, until, everywhere
        self._users = 0
        self._before: Any = None
        self._of_all: list[Any] = []
        self._kept: list[contextlib.AbstractContextManager[None]] = []
        self._mine: contextvars.ContextVar[Any] = contextvars.ContextVar(name, default=None)

    @property
    def object(self) -> Any:
        """The module or class that has the attribute; raises ImportError or AttributeError if there is none."""
        module, _, attribute = self.owner.partition(":")
        owner: Any = importlib.import_module(module)
        return getattr(owner, attribute) if attribute else owner

    @contextlib.contextmanager
    def by(self, instead: Callable[..., Any]) -> Iterator[None]:
        """Redirect calls to `instead` inside the `with` statement; it returns the original function."""
        with _LOCK:
            if not self._users:
                # From `vars`: to ask a class for it would bind a classmethod, and put that back later.
                self._before = vars(self.object).get(self.name) or getattr(self.object, self.name)
                self._put(self._dispatcher())
            self._users += 1
            call = functools.partial(instead, self._function)
            self._of_all += [call] * self.everywhere
        token = None if self.everywhere else self._mine.set(call)
        try:
            yield
        finally:
            if token is not None:
                self._mine.reset(token)
            with _LOCK:
                if self.everywhere:
                    self._of_all.remove(call)
                self._users -= 1
                if not self._users:
                    self._put(self._before)

    def forever(self, instead: Callable[..., Any]) -> Any:
        """Redirect calls to `instead` from now on, as `by` does; return the replacement. Only the first call counts."""
        with _LOCK:
            if not self._kept:
                self._kept.append(self.by(instead))
                self._kept[0].__enter__()
            return vars(self.object)[self.name]

    @property
    def _function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = self._before
        if isinstance(self._before, classmethod | staticmethod):
            function = self._before.__func__
        elif isinstance(self._before, _OF_C_TYPES):  # bound to the class when it is looked up
            function = lambda cls, *args, **kwargs: self._before.__get__(None, cls)(*args, **kwargs)  # noqa: E731
        return function

    def _dispatcher(self) -> Any:
        before = self._function

        def call(*args: Any, **kwargs: Any) -> Any:
            of_all = self._of_all
            instead = (of_all[-1] if of_all else None) if self.everywhere else self._mine.get()
            return (instead or before)(*args, **kwargs)

        if isinstance(self._before, classmethod | staticmethod | _OF_C_TYPES):
            kind = staticmethod if isinstance(self._before, staticmethod) else classmethod
            return kind(call)
        if isinstance(self.object, type):
            return functools.wraps(before)(call)
        return _Function(call, before)

    def _put(self, value: Any) -> None:
        owner = self.object
        try:
            setattr(owner, self.name, value)
        except TypeError:  # a type of C, whose attributes Python itself does not change
            (attributes,) = gc.get_referents(owner.__dict__)
            attributes[self.name] = value
            _MODIFIED(ctypes.py_object(owner))


def caller() -> str:
    """Return the name of the module that called a replaced function. Replacements call this."""
    frame = sys._getframe(1)
    replaces = (__name__, frame.f_globals["__name__"])
    while frame.f_back and frame.f_globals.get("__name__") in replaces:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


_OF_C_TYPES = type(dict.__dict__["fromkeys"])


class _Function:
    """A function that a class does not bind as a method, as it does not bind functions of C."""

    def __init__(self, call: Callable[..., Any], before: Callable[..., Any]) -> None:
        functools.update_wrapper(self, before)
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


_MLIR = "jax._src.interpreters.mlir"

BACKEND = Patch(
    *(f"{_MLIR}:ModuleContext", "get_backend"),
    "JAX takes older forms of operations where no backend is there to ask whether it knows the newer ones",
    ".get_backend(optional=True)",
)
FORMS = Patch(
    *(f"{_MLIR}:LoweringRuleContext", "is_forward_compat"),
    "a module is lowered for each kind of device where an operation has another form for exports: this notices it",
    ".is_forward_compat()",
)
CONTEXT_MESH = Patch(
    *("jax._src.pjit", "get_ctx_mesh"),
    "JAX counts the devices of a mesh without devices only where an argument, a result or an Explicit axis names it",
    "if not abs_mesh.empty and abs_mesh._any_axis_explicit:",
)
_SPLIT = "over Explicit axes JAX splits the sizes of arrays too, and then it cannot refine its own module"
SIZES = (
    Patch(_MLIR, "eval_dynamic_shape", _SPLIT, "partial(core.evaluate_shape, shape, ctx.module_context"),
    Patch("jax._src.export._export", "_wrap_main_func", _SPLIT, "mlir_module = _wrap_main_func("),
)
_NO_DEVICE = "a kernel may ask which device is there, and this machine has none"
LOCAL_DEVICES = Patch("jax", "local_devices", _NO_DEVICE, 'jax.local_devices(backend="gpu")')
DEFAULT_DEVICE = Patch("jax.extend.backend", "get_default_device", _NO_DEVICE, "backend.get_default_device()")
DEFAULT_DEVICE_OF_ALL = Patch("jax._src.interpreters.pxla", "get_default_device", _NO_DEVICE, "get_default_device().")
_FORKS = "a process that forks must have no thread when it does, and one that has exported has some"
CLIENT = Patch("jax._src.xla_bridge", "get_backend", _FORKS, "xb.get_backend().serialize_with_sdy")
CONTEXT = Patch(_MLIR, "make_ir_context", _FORKS, "context.set_thread_pool(global_thread_pool)")
EFFECTS = tuple(
    Patch(
        *("jax._src.effects:EffectTypeSet", name),
        "JAX lists effects in the order of a set of classes, which follows their addresses",
        f"return [eff for eff in effects if {condition}]",
    )
    for name, condition in (("filter_in", "self.contains(eff)"), ("filter_not_in", "not self.contains(eff)"))
)

COMPILE = Patch(
    *("jax._src.compiler", "compile_or_get_cached"),
    "a build takes what JAX would compile, with the options and devices that its key has, and compiles it elsewhere",
    "compiler.compile_or_get_cached(",
)
KEY_PARTS = Patch(
    *("jax._src.cache_key", "_log_cache_key_hash"),
    "JAX hashes the parts of a key and keeps none; here they pass one by one, with their names",
    "_log_cache_key_hash(hash_obj, name, hashfn)",
)
CACHE_KEY = Patch(
    *("jax._src.compilation_cache", "get_cache_key"),
    "on CPUs the key has a fingerprint of the machine's CPU, and an entry is for every CPU that can run it",
    "topology.fingerprint().to_bytes(",
    everywhere=True,
)
CACHE = Patch(
    *("jax._src.compilation_cache", "get_file_cache"),
    "JAX reads the entries of a folder unchecked, and writes what it compiles into the same one",
    "cache = LRUCache(path, max_size=max_size)",
    everywhere=True,
)

_CALLBACKS = {
    "callback": ("pure_callback_p", "io_callback_p"),
    "buffer_callback": ("buffer_callback_p",),
    "debugging": ("debug_callback_p", "debug_print_p", "inspect_sharding_p"),
}
CALLBACKS = tuple(
    Patch(
        *(f"jax._src.{module}:{primitive}", "bind"),
        "callbacks without results are left out of an artifact, and an error says where the others were bound",
        everywhere=True,
    )
    for module, primitives in _CALLBACKS.items()
    for primitive in primitives
)

STAT = tuple(
    Patch("os", name, "a file's size is read without an event, and Bazel must know of it", everywhere=True)
    for name in ("stat", "lstat", "access")
)
FIND = Patch("importlib.machinery:FileFinder", "find_spec", "what an import looks for has no event", everywhere=True)
OPEN = Patch("os", "open", "the event does not say below which folder", everywhere=True)

_CLOCK = "what a model reads of a clock would be other bytes in each build"
_CHANCE = "random numbers that nobody seeded would be other bytes in each build"


def _of_all(owner: str, names: tuple[str, ...], why: str) -> tuple[Patch, ...]:
    return tuple(Patch(owner, name, why, everywhere=True) for name in names)


_MEASURES = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
CLOCKS = _of_all("time", (*_MEASURES, "clock_gettime"), _CLOCK)
CLOCKS_IN_NS = _of_all("time", tuple(f"{name}_ns" for name in (*_MEASURES, "clock_gettime")), _CLOCK)
CONVERTED_TIMES = _of_all("time", ("localtime", "gmtime", "ctime"), _CLOCK)
FORMATTED_TIMES = _of_all("time", ("asctime", "strftime"), _CLOCK)
NOW, UTCNOW = _of_all("datetime:datetime", ("now", "utcnow"), _CLOCK)
(TODAY,) = _of_all("datetime:date", ("today",), _CLOCK)
(SLEEP,) = _of_all("time", ("sleep",), "a loop that waits for a time would wait long")
ENTROPY = (*_of_all("os", ("urandom", "getrandom"), _CHANCE), *_of_all("random", ("_urandom",), _CHANCE))
(SEED,) = _of_all("random", ("seed",), _CHANCE)
(SEED_OF_CLASS,) = _of_all("random:Random", ("seed",), _CHANCE)
UUID1, NODE = _of_all("uuid", ("uuid1", "getnode"), "they have the clock's time and the address of this machine")

PATCHES: tuple[Patch, ...] = tuple(
    patch
    for value in tuple(globals().values())
    for patch in (value if isinstance(value, tuple) else (value,))
    if isinstance(patch, Patch)
)
"""All of them."""
