"""Functions of manifests, for the keys that no function of the zoo shows, and the types that they take."""

from typing import Any

import equinox
import flax.struct
import jax
import jax.numpy as jnp

from tests.zoo.effects import count, read


@flax.struct.dataclass
class Struct:
    bias: jax.Array
    weight: jax.Array
    mode: str = flax.struct.field(pytree_node=False, default="train")  # type: ignore[no-untyped-call]


class Module(equinox.Module):
    bias: jax.Array
    weight: jax.Array
    scale: float = equinox.field(static=True)


def affine(x: Any, y: Any) -> Any:
    return x @ y + 1


def struct(model: Struct, x: Any) -> Any:
    return Struct(model.bias + x @ model.weight, model.weight, model.mode)


def struct_avals() -> Any:
    return Struct(_vector(3), _vector(2, 3)), _vector(2)


def module(model: Module, x: Any) -> Any:
    return Module(model.bias + x @ model.weight * model.scale, model.weight, model.scale)


def module_avals() -> Any:
    return Module(_vector(3), _vector(2, 3), 0.5), _vector(2)


def _vector(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def scaled(x: Any, unused: Any = None, *, scale: Any) -> Any:
    return x * scale


def counted(x: Any) -> Any:
    return jnp.arange(3) + jnp.float32(2) ** x, jnp.sum(x)


def seeded(seed: Any) -> Any:
    key = jax.random.key(seed)
    return jax.random.normal(key, (3,)), jax.random.key_data(key), jax.random.PRNGKey(seed)


def drawn(key: Any, x: Any) -> Any:
    return jax.random.split(key)[0], jax.random.normal(key, x.shape) + x


def cubed(x: Any) -> Any:
    return jnp.sin(x) * x**3


def pivoted(x: Any) -> Any:
    return jax.scipy.linalg.qr(x, pivoting=True)


def padded(x: Any, y: Any) -> Any:
    return jnp.concatenate([x, x]) * y.sum(), x.reshape(x.shape[0] // 8, 8).sum(1)


def mean(x: Any) -> Any:
    return x.mean(0)


def sharded(params: Any, x: Any) -> Any:
    return {"total": x.sum(0), "y": x @ params["w"] + params["b"]}


def summed(x: Any, y: Any) -> Any:
    return x + y, y * 2


def effectful(state: Any, x: Any) -> Any:
    return count(read(state)) + x.sum(), x


def crossed(state: Any, unused: Any, x: Any, power: int = 2) -> Any:
    """What differs by platform (`cumsum`), takes a dimension as a value, and changes what is donated to it."""
    total = jnp.cumsum(x, axis=0) * x.shape[0]
    return {"most": jnp.argmax(x, axis=1), "state": state + total.sum(0) ** power, "total": total}


def crossed_unordered(state: Any, unused: Any, x: Any, power: int = 2) -> Any:
    return crossed(state, unused, count(x), power)


def crossed_ordered(state: Any, unused: Any, x: Any, power: int = 2) -> Any:
    return crossed(read(state), unused, x, power)
