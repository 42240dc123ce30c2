"""Selection: decide which part of a bundle runs here, and why the others do not.

`select` is one pure function of a bundle's offers and of the facts about the process. Loading, calls and `stagec
explain` all use it. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from stagec.bundle.description import architecture
from stagec.bundle.index import UNKNOWN as ANY_RELEASE, UNKNOWN_CALL, numbers
from stagec.core.builds import naming
from stagec.core.messages.refusal import LoadError
from stagec.core.sizes.avals import Aval, evaluate_shape, physical
from stagec.pjrt.host import Host, architecture_refusal, cpu_refusal

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""Shapes of the leaves of the arguments, flat."""
Policy: TypeAlias = Literal["allow_compile", "executable_only", "measured", "measured_only"]
POLICIES: tuple[Policy, ...] = ("allow_compile", "executable_only", "measured", "measured_only")
MEASURED: tuple[Policy, ...] = ("measured", "measured_only")
"""Those that take executables of an older jaxlib, where somebody has measured its operations here."""
NO_COMPILE: tuple[Policy, ...] = ("executable_only", "measured_only")

CHOSEN, FITS = "chosen", "fits"
_ORDER = (
    "target",
    "platform",
    "device-kind",
    "device-count",
    "architecture",
    "cpu-feature",
    "jaxlib-version",
    "plugin-version",
    "custom-call",
    "policy",
    "expired",
    "shape",
)
"""Codes of refusals, in the order of the checks: a refusal by a later check is a nearer miss."""


# A named tuple, as all records of the loader are: a frozen dataclass takes 0.6 ms to define, five times as long, and
# imports are most of the time to a first result (benchmarks/README.md).
class Offer(NamedTuple):
    """A candidate to run: an executable, or the exported artifact, which must be compiled first.

    kind: "executable" or "exported". member: its name in the bundle.
    platforms: one for an executable; in the order of preference.
    architecture: of the CPU that runs its machine code; "" for an exported artifact, and for other platforms.
    nr_devices: None if it is not known before the artifact is read.
    static_avals: the parameters of an executable, flat, with the sizes of its bucket. shapes: theirs; empty for an
    exported artifact.
    readable_until: the last day of the releases that JAX promises to read the artifact, as the index has it.
    """

    kind: Literal["executable", "exported"]
    member: str
    platforms: tuple[str, ...]
    target: str = ""
    device_kind: str = ""
    architecture: str = ""
    requires: tuple[str, ...] = ()
    nr_devices: int | None = None
    versions: Mapping[str, str] = MappingProxyType({})
    unknown_calls: tuple[str, ...] = ()
    bucket: Mapping[str, int] = MappingProxyType({})
    static_avals: tuple[Aval, ...] = ()
    shapes: Shapes = ()
    readable_until: str = ANY_RELEASE


class Candidate(NamedTuple):
    """An offer and the verdict on it.

    code: "chosen"; "fits" if only an earlier candidate keeps it from running; else the code of the refusal
    (`LoadError`).
    reason: the same for people.
    """

    offer: Offer
    code: str
    reason: str

    def to_plain(self) -> dict[str, Any]:
        """Return the JSON form: one flat object."""
        offer = self.offer
        return {
            "member": offer.member,
            "kind": offer.kind,
            "target": offer.target,
            "platforms": list(offer.platforms),
            "bucket": dict(offer.bucket),
            "code": self.code,
            "reason": self.reason,
        }


class Asked(NamedTuple):
    """The caller's request.

    target: None: any. platform: of that target.
    policy: whether an exported artifact may be compiled when no executable fits.
    crosses: returns why an executable of another jaxlib must not run here; None: none may.
    num_devices: how many devices the caller names; None: none. shapes: None: any.
    """

    target: str | None = None
    platform: str | None = None
    policy: Policy = "allow_compile"
    crosses: Callable[[Offer], str] | None = None
    num_devices: int | None = None
    shapes: Shapes | None = None


class BoundArray(NamedTuple):
    """An array of an argument, with its data in the bundle.

    path: of the argument, `args[0]['w']`. weight: `FILE:ARRAY`, as in the manifest.
    aval: dtype and shape. bytes: its size in the bundle, and on each device that has the whole array.
    """

    path: str
    weight: str
    aval: str
    bytes: int


class Selection(NamedTuple):
    """The candidates for a function, in the order of preference, and which one is taken.

    bound: the arrays that a call takes from the bundle unless the caller gives them.
    """

    function: str
    candidates: tuple[Candidate, ...]
    bound: tuple[BoundArray, ...] = ()

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that runs; None if none fits."""
        return next((candidate for candidate in self.candidates if candidate.code == CHOSEN), None)

    def __repr__(self) -> str:
        what = self.chosen.offer.member if self.chosen else "nothing fits"
        return f"Selection({self.function}: {what}, of {len(self.candidates)} candidates)"

    def refusal(self, path: str) -> LoadError:
        """Return why nothing in the bundle at `path` fits, with the code of the nearest miss."""
        if not self.candidates:
            return LoadError("no-target", f"{path}: the bundle has nothing to run for {self.function}")
        executables = [c.code for c in self.candidates if c.offer.kind == "executable"]
        # The one that passed the most checks came nearest, so its reason is the one to mend.
        code = max(executables or [c.code for c in self.candidates], key=_ORDER.index)
        reasons = (f"{candidate.offer.target or 'compiling'}: {candidate.reason}" for candidate in self.candidates)
        return LoadError(code, f"{path}: {self.function} cannot run here; {'; '.join(dict.fromkeys(reasons))}")

    def to_plain(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "function": self.function,
            "candidates": [candidate.to_plain() for candidate in self.candidates],
            "bound": [array._asdict() for array in self.bound],
        }

    def as_text(self) -> str:
        """Return a table for a person. Ends with a newline."""
        lines = _table([(c.offer.member, c.code, c.reason) for c in self.candidates])
        lines += _table([(f"{a.path} is {a.weight}", a.aval, f"{a.bytes:,} bytes") for a in self.bound])
        return "\n".join([self.function, *lines]) + "\n"


def nearest_refusal(selections: Iterable[Selection], path: str) -> LoadError:
    """Return the refusal of the function that came nearest to running, the first of several.

    selections: of the functions of the bundle at `path`, at least one; in none of them is a candidate chosen.
    """
    return max((selection.refusal(path) for selection in selections), key=lambda error: _ORDER.index(error.code))


def shapes_of(avals: Sequence[Aval]) -> Shapes:
    """Return the shapes of static avals."""
    return tuple(tuple(map(int, aval.shape)) for aval in avals)


def offers(index: Mapping[str, Any], artifact: str, in_avals: Sequence[Aval]) -> tuple[Offer, ...]:
    """Return the offers of a bundle for one signature of a function, in the order of preference.

    Accelerators come before the CPU, the most demanding target first, executables before the exported artifact.
    in_avals: of the signature, as the index has them.
    """
    entry, targets = index["functions"][artifact], index["targets"]
    module_avals = [Aval(aval.dtype, aval.shape) for aval in map(physical, in_avals)]
    # The index lists targets from the least demanding to the most.
    rank = {name: (target["platform"] != "cpu", i) for i, (name, target) in enumerate(index["targets"].items())}
    avals_of = [
        tuple(Aval(aval.dtype, evaluate_shape(aval.shape, executable["bucket"])) for aval in module_avals)
        for executable in entry["executables"]
    ]
    executables = [
        Offer(
            "executable",
            executable["executable"],
            (targets[executable["target"]]["platform"],),
            target=executable["target"],
            device_kind=targets[executable["target"]]["device_kind"],
            architecture=architecture(targets[executable["target"]]),
            requires=tuple(targets[executable["target"]]["requires"]),
            nr_devices=executable["nr_devices"],
            versions=executable["versions"],
            unknown_calls=tuple(n for n, provider in executable["custom_calls"].items() if provider == UNKNOWN_CALL),
            bucket=executable["bucket"],
            static_avals=avals,
            shapes=shapes_of(avals),
        )
        for executable, avals in zip(entry["executables"], avals_of, strict=True)
    ]
    executables.sort(key=lambda offer: rank[offer.target], reverse=True)
    # Without targets any accelerator comes before the CPU. With targets, selection ignores an accelerator without one.
    ordered = ["cpu", *(index["targets"][name]["platform"] for name in sorted(rank, key=lambda name: rank[name]))]
    preference = {platform: 2 + i for i, platform in enumerate(ordered)} if rank else {}
    portable = Offer(
        "exported",
        entry["exported"],
        tuple(sorted(entry["platforms"], key=lambda platform: -preference.get(platform, platform != "cpu"))),
        nr_devices=executables[0].nr_devices if executables else entry["nr_devices"],
        versions=entry["versions"],
        readable_until=entry["readable_until"],
    )
    return (*executables, portable)


def select(function: str, offered: Sequence[Offer], host: Host, asked: Asked) -> Selection:
    """Return every offer with a verdict; the first that fits is chosen.

    An exported artifact fits the shapes of the executables beside it, or any shapes if there are none. Executables of
    this jaxlib come before those of others, and of one target the newest of those first.
    """
    shapes = {offer.shapes for offer in offered if offer.kind == "executable"}
    if asked.crosses:
        offered = _exact_first(offered, host)
    candidates = []
    taken: Offer | None = None
    for offer in offered:
        code, reason = next(_faults(offer, host, asked, shapes), (FITS, ""))
        if code == FITS and taken is not None:
            reason = f"{taken.member} comes first"
        elif code == FITS:
            code, taken = CHOSEN, offer
            reason = _runs(offer, host) if offer.kind == "executable" else "is compiled at the first call"
            reason = "; ".join(filter(None, (reason, unknown_release(offer, host))))
        candidates.append(Candidate(offer, code, reason))
    if asked.shapes is None and taken is not None and taken.kind == "executable":
        # Buckets beside the chosen one run as well, each for its own shapes.
        sizes = {taken.shapes}
        for i, (offer, code, _) in enumerate(candidates):
            if code == FITS and offer.target == taken.target and offer.shapes not in sizes:
                sizes.add(offer.shapes)
                candidates[i] = Candidate(offer, CHOSEN, _runs(offer, host))
    return Selection(function, tuple(candidates))


def crosses(offer: Offer, host: Host) -> bool:
    """Whether an offer is an executable of another jaxlib than this process's."""
    return offer.kind == "executable" and offer.versions["jaxlib"] != host.jaxlib


def _plugins(platform: str) -> list[str]:
    from stagec.core.builds.platforms import PLATFORMS  # a process with CPUs alone does without dataclasses

    return [plugin.distribution for plugin in PLATFORMS[platform].plugins]


def _runs(offer: Offer, host: Host) -> str:
    made = f"; jaxlib {offer.versions['jaxlib']} made it, and its operations were measured here"
    return "runs as it is" + (made if crosses(offer, host) else "")


def _exact_first(offered: Sequence[Offer], host: Host) -> list[Offer]:
    places = [offer.target for offer in offered]

    def order(offer: Offer) -> tuple[int, int, list[int]]:
        if not crosses(offer, host):
            return 2 * (offer.kind == "exported"), 0, []
        return 1, places.index(offer.target), [-number for number in numbers(offer.versions["jaxlib"])]

    return sorted(offered, key=order)


def usable_platform(offer: Offer, host: Host, asked: Asked) -> str | None:
    """Return the first platform of an offer that is asked for and that this process has; None if it has none."""
    wanted = [name for name in offer.platforms if asked.platform in (None, name)]
    return next((name for name in wanted if not host.platforms[name].refusal), None)


def unknown_release(offer: Offer, host: Host) -> str:
    """Return the warning before a jaxlib of unknown age compiles an exported artifact; "" for any other jaxlib."""
    readable, doubt = _promised(offer, host)
    return doubt if readable is None else ""


def _promised(offer: Offer, host: Host) -> tuple[bool | None, str]:
    """Return whether JAX promises that this jaxlib reads an artifact; see `expiry.may_read`."""
    made_with = offer.versions.get("jaxlib")
    if offer.readable_until == ANY_RELEASE or made_with == host.jaxlib:
        return True, ""
    from stagec.bundle import expiry  # most bundles are read with the jaxlib that made them

    return expiry.may_read(host.jaxlib, offer.readable_until, made_with)


def _faults(offer: Offer, host: Host, asked: Asked, shapes: set[Shapes]) -> Iterator[tuple[str, str]]:
    """Yield the reasons against an offer, by `_ORDER`: code and sentence."""
    if asked.target is not None and offer.target not in ("", asked.target):
        yield "target", f"the target that was asked for is {asked.target}"
    name = usable_platform(offer, host, asked)
    if name is None:
        wanted = [name for name in offer.platforms if asked.platform in (None, name)]
        reasons = [host.platforms[name].refusal for name in wanted]
        yield "platform", "; ".join(reasons) or f"it is for {', '.join(offer.platforms)}, not for {asked.platform}"
        return
    platform = host.platforms[name]
    kinds = platform.device_kinds
    if kinds and offer.device_kind and offer.device_kind not in kinds:
        yield "device-kind", f"it is for {offer.device_kind}, here is {', '.join(sorted(set(kinds)))}"
    available = (
        asked.num_devices if asked.num_devices is not None else platform.num_devices or (len(kinds) if kinds else None)
    )
    if offer.nr_devices is not None and available is not None and available < offer.nr_devices:
        where = "are here" if platform.processes == 1 else f"are in the {platform.processes} processes"
        where = "were named" if asked.num_devices is not None else where
        yield "device-count", f"it runs on {offer.nr_devices} devices, {available} {where}"
    if refusal := architecture_refusal(offer.architecture, host.architecture):
        yield "architecture", refusal
    # A CPU may lack flags that only add speed: `requires` has only flags without which the code must not run.
    if name == "cpu" and (refusal := cpu_refusal(offer.requires, host.cpu_flags)):
        yield "cpu-feature", refusal
    if offer.kind == "executable":
        # XLA promises nothing about an executable's form to another release, and checks little.
        why = asked.crosses(offer) if asked.crosses and crosses(offer, host) else None
        if crosses(offer, host) and why != "":
            made = f"it was compiled with jaxlib {offer.versions['jaxlib']}, here is {host.jaxlib}"
            yield "jaxlib-version", "; ".join(filter(None, (made, why)))
        have = platform.versions
        for package in _plugins(name) if have else ():
            want = offer.versions.get(package)
            if want and have.get(package) != want:
                here = have.get(package) or " ".join(*have.items())
                yield "plugin-version", f"it was compiled with {package} {want}, here is {here}"
        if offer.unknown_calls:
            yield "custom-call", f"it calls {', '.join(offer.unknown_calls)}, which jaxlib does not have"
        if asked.shapes is not None and asked.shapes != offer.shapes:
            yield "shape", f"it is for {_sizes(offer)}"
    else:
        if asked.policy in NO_COMPILE:
            yield "policy", f"compiling is not allowed ({asked.policy})"
        readable, reason = _promised(offer, host)
        if readable is False:
            maker = (
                f"jaxlib {offer.versions['jaxlib']}, which made it" if "jaxlib" in offer.versions else "an older jaxlib"
            )
            yield "expired", f"{reason}; install {maker}, or build the bundle again with a newer jax in your lock"
        if asked.shapes is not None and shapes and asked.shapes not in shapes:
            yield "shape", "the shapes are in no bucket"


def _table(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
    return [f"  {first:<{widths[0]}}  {second:<{widths[1]}}  {third}" for first, second, third in rows]


def _sizes(offer: Offer) -> str:
    """Return the sizes that an executable is for: its bucket, or where it has none its arguments."""
    if offer.bucket:
        return naming.bucket(offer.bucket)
    return ", ".join(map(str, offer.static_avals))
