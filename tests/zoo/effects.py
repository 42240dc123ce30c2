"""A function with effects, ordered and unordered ones, that artifacts can hold: they call nothing on the host.

JAX itself has only effects of host callbacks; these are made as libraries make theirs.
"""

from typing import Any

from jax import lax
from jax._src import core, effects
from jax._src.interpreters import ad, mlir
from jax._src.lib.mlir.dialects import hlo


class Effect(effects.Effect):
    """One that JAX can write down: all of a class are equal."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class Read(Effect):
    """Ordered."""


class Write(Effect):
    """Ordered, in an order of its own."""


class Count(Effect):
    """Unordered."""


def doubles(name: str, *kinds: type[Effect]) -> Any:
    """Return a function of one array that has these effects; each ordered one takes a token and gives a new one."""

    def lowering(ctx: Any, x: Any) -> Any:
        ordered = [kind() for kind in kinds if kind is not Count]
        if ordered:
            after = {effect: hlo.after_all([ctx.tokens_in.get(effect)]) for effect in ordered}
            ctx.set_tokens_out(mlir.TokenSet(after))
        return [hlo.add(x, x)]

    primitive = core.Primitive(name)
    primitive.def_effectful_abstract_eval(lambda x: (x, {kind() for kind in kinds}))
    mlir.register_lowering(primitive, lowering)
    ad.primitive_jvps[primitive] = lambda primals, tangents: (primitive.bind(*primals), tangents[0] * 2)
    return primitive.bind


for kind in (Read, Write, Count):
    effects.lowerable_effects.add_type(kind)
    effects.control_flow_allowed_effects.add_type(kind)
effects.ordered_effects.add_type(Read)
effects.ordered_effects.add_type(Write)
read, write, count = doubles("read", Read), doubles("write", Write), doubles("count", Count)
everything = doubles("everything", Read, Write, Count)


def effectful(state: Any, unused: Any, x: Any) -> Any:
    carry, sums = lax.scan(lambda carry, _: (read(carry) * 0.4, carry.sum()), x, length=3)
    chosen = lax.cond(sums[0] > 0, count, lambda x: x, write(carry))
    return {"chosen": chosen, "state": everything(state) + x.sum(), "sums": sums}
