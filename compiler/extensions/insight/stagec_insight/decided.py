"""Golden outputs of what compilers decided for devices: their optimized programs, run on CPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from stagec.backends import compilation
from stagec.bundle.archive import Archive
from stagec.bundle.description import Description
from stagec.bundle.external import Files
from stagec.bundle.index import describe
from stagec.checking import golden as goldens, trials
from stagec.core.messages.refusal import CallError
from stagec.core.sizes.avals import physical
from stagec.core.trees.tree import argument_path
from stagec.loader.variant import bucket_name
from stagec.pjrt.arrays import dtype_of
from stagec.pjrt.weights import Weight, Weights
from stagec_insight import emulation
from stagec_insight.emulation import NotCovered


def check(
    archive: Archive,
    functions: Collection[str] = (),
    platform: str | None = None,
    weights: str | None = None,
    programs: Mapping[str, bytes] | None = None,
) -> Iterator[goldens.Check | goldens.Refused]:
    """Run the optimized programs of device compilers on CPUs, and compare each result.

    functions: names of signatures; none: all with golden inputs. platform: of the targets, "cuda" or "tpu"; None: both.
    weights: as for `check`. programs: optimized programs, XLA's HloModuleProto, for executables that do not contain
    them, such as a TPU's, by names such as mlp.v5e-2x2 or mlp.v5e-2x2.batch8.
    Yields a `Refused` for a program that is missing or has no form for CPUs.
    Raises CallError ("static") for a function without golden inputs, LoadError as calls do.
    """
    index = archive.index
    have = [name for name, signature in index["functions"].items() if "golden" in signature]
    for name in functions:
        if name not in have:
            what = f"{name} has no golden inputs"
            raise CallError("static", f"{what}; write one of {', '.join(have)}" if have else what)
    bound = Weights.from_archive(archive, files=Files(archive.path, index, weights, "use")).by_name
    for name in functions or have:
        signature = index["functions"][name]
        golden = signature["golden"]
        for built in signature["executables"]:
            target = built["target"]
            of = index["targets"][target]["platform"]
            if of == "cpu" or platform not in (None, of) or built["bucket"] != golden["bucket"]:
                continue
            stem = ".".join(filter(None, (name, target, bucket_name(built["bucket"]))))
            module = (programs or {}).get(stem) or _module(of, archive[built["executable"]])
            if not module:
                what = f"the executable does not say it; write --hlo {stem}=FILE, of output group hlo_proto"
                yield goldens.Refused(name, target, what)
                continue
            description = describe(index, name, built, archive[built["description"]])
            inputs = {path: goldens.array_of(archive, row) for path, row in golden["inputs"].items()}
            arrays = {entry["leaf"]: bound[entry["weight"]] for entry in signature["bind"]}
            try:
                results = _run_optimized(module, description, inputs, arrays)
            except NotCovered as error:
                yield goldens.Refused(name, target, str(error))
                continue
            yield from goldens.compared(golden, results, archive, name, f"{target}, on CPUs")


def _module(platform: str, serialized: bytes) -> bytes:
    """Return the optimized program in the bytes of an executable; empty if there is none."""
    layers = compilation.backend(platform).layers(serialized)
    return next((data for layer, data, _ in layers if layer == "optimized HLO"), b"")


def _run_optimized(
    module: bytes, description: Description, inputs: trials.Arrays, weights: Mapping[int, Weight]
) -> trials.Arrays:
    paths = [argument_path(path) for path in description.in_tree.paths()]
    kept = description.kept_var_idx
    parameters, results = (
        [(tuple(map(int, physical(aval).shape)), dtype_of(aval)) for aval in avals]
        for avals in ([description.in_avals[i] for i in kept], description.out_avals)
    )
    donated = [number for number, i in enumerate(kept) if description.donated[i]]
    executable = emulation.load(module, parameters, results, description.nr_devices, donated)
    buffers = [
        executable.put(number, weights[i].on(executable.parameters[number]) if i in weights else inputs[paths[i]])
        for number, i in enumerate(kept)
    ]
    names = [f"result{path}" for path in description.out_tree.paths()]
    return dict(zip(names, (result.numpy() for result in executable.run(buffers)), strict=True))
