"""Run every case with jax.jit, shown the CPU that the zoo is compiled for: reference.py OUTPUT.npz."""

import sys
from typing import Any

import jax
import numpy as np

from stagec.backends.cpu import compiler as cpu
from stagec.core.builds.specs import CpuTarget
from tests.zoo import effects, nodes, zoo
from tests.zoo.flat import flat
from tests.zoo.inputs import cases


def plain(value: Any) -> Any:
    """What the loader returns where the types are not there: dicts of the fields that hold arrays."""
    match value:
        case zoo.Point():
            return value._asdict()
        case zoo.Cloud():
            return {"mean": value.mean, "points": [plain(point) for point in value.points]}
        case nodes.Gauge():
            return {"dial": value.dial.hands, "table": value.table.columns, "unit": {}}
    return value


def expected(function: str, given: Any, kwargs: Any) -> Any:
    """The result of one case."""
    args = given
    if function == "draw":
        args = (jax.random.wrap_key_data(given[0]),)
    elif function == "typed":
        points = [zoo.Point(**point) for point in given[0]["points"]]
        args = (zoo.Cloud(given[0]["mean"], points, "m"), given[1])
    elif function == "turned":
        dial, table = nodes.Dial("±", *given[0]["dial"]), nodes.Table(given[0]["table"])
        args = (nodes.Gauge(dial, table, nodes.Unit("m")), given[1])
    if function == "scale":
        return given[0] * given[1]
    if function == "sharded":
        with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
            shardings = ({"w": jax.P(None, "model"), "b": jax.P("model")}, jax.P("data"))
            return jax.jit(zoo.sharded, in_shardings=shardings)(*given)
    if function == "halves":
        with jax.set_mesh(jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))):
            return jax.jit(zoo.halves, in_shardings=jax.P("d"))(*given)
    static = ["power"] if "power" in kwargs else []
    module = next(module for module in (zoo, nodes, effects) if hasattr(module, function))
    return plain(jax.jit(getattr(module, function), static_argnames=static)(*args, **kwargs))


jax.config.update("jax_num_cpu_devices", 4)
with cpu.presented(CpuTarget("cpu", "AVX2", 2, {})):
    np.savez(sys.argv[1], **flat({name: expected(*case) for name, case in cases().items()}))
