"""The values that a `checkpoint` keeps for its derivative: names for values, and JAX's policies.

https://docs.jax.dev/en/latest/gradient-checkpointing.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stagec_arrays import pytrees
from stagec_arrays.namespace.promotion import array_of
from stagec_arrays.primitives.calls import NAME, named
from stagec_arrays.primitives.contractions import CONVOLUTION, DOT_GENERAL
from stagec_arrays.program import Primitive

Policy = Callable[..., bool]
"""Takes the primitive of an operation, what is known of each operand, and parameters by name: are its results kept?"""


def checkpoint_name(x: Any, name: str) -> Any:
    """Return a tree of arrays under a name, so that a policy of `checkpoint` can keep them.

    As `jax.ad_checkpoint.checkpoint_name`.

    >>> import stagec_arrays.numpy as np
    >>> def layer(w, x):
    ...     return np.sin(stagec_arrays.checkpoint_name(x * w, "product"))
    >>> policy = stagec_arrays.checkpoint_policies.save_only_these_names("product")
    >>> float(stagec_arrays.grad(stagec_arrays.checkpoint(layer, policy=policy))(0.0, 2.0))
    2.0
    """
    return pytrees.tree_map(lambda leaf: named(array_of(leaf, "checkpoint_name"), name), x)


def _of_names(keeps: Callable[[str], bool], others: bool = False) -> Policy:
    def policy(primitive: Primitive, *_: Any, **params: Any) -> bool:
        return keeps(params["name"]) if primitive is NAME else others

    return policy


class checkpoint_policies:  # noqa: N801 - JAX's name
    """The values that `checkpoint(policy=...)` keeps for the derivative, as `jax.checkpoint_policies`.

    You can write a policy too: a function that takes the primitive of an operation (`primitive.name` is its name in the
    text of a program), what is known of each operand, and the parameters by name. It returns whether to keep the
    results. stagec does not have JAX's policies that offload.

    >>> import stagec_arrays.numpy as np
    >>> policy = stagec_arrays.checkpoint_policies.dots_saveable
    >>> layer = stagec_arrays.checkpoint(lambda w, x: np.sin(x @ w), policy=policy)
    >>> float(stagec_arrays.grad(layer)(np.zeros(2), np.ones(2))[0])
    1.0
    """

    @staticmethod
    def everything_saveable(*_: Any, **__: Any) -> bool:
        """Keep all, as without `checkpoint`."""
        return True

    @staticmethod
    def nothing_saveable(*_: Any, **__: Any) -> bool:
        """Keep only the arguments, as without a policy."""
        return False

    @staticmethod
    def dots_saveable(primitive: Primitive, *_: Any, **__: Any) -> bool:
        """Keep products of matrices, and convolutions."""
        return primitive in (DOT_GENERAL, CONVOLUTION)

    @staticmethod
    def dots_with_no_batch_dims_saveable(primitive: Primitive, *_: Any, **params: Any) -> bool:
        """Keep products of matrices that have no batch axes: those with weights, in a transformer."""
        return primitive is DOT_GENERAL and not params["numbers"][2]

    checkpoint_dots = dots_saveable
    checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable

    @staticmethod
    def save_only_these_names(*names: str) -> Policy:
        """Return the policy that keeps values with one of these names (`checkpoint_name`)."""
        return _of_names(lambda name: name in names)

    @staticmethod
    def save_any_names_but_these(*names: str) -> Policy:
        """Return the policy that keeps values with any other name."""
        return _of_names(lambda name: name not in names)

    @staticmethod
    def save_anything_except_these_names(*names: str) -> Policy:
        """Return the policy that keeps everything except values with one of these names."""
        return _of_names(lambda name: name not in names, others=True)

    @staticmethod
    def save_from_both_policies(policy_1: Policy, policy_2: Policy) -> Policy:
        """Return the policy that keeps everything that one of the two keeps."""

        def policy(primitive: Primitive, *avals: Any, **params: Any) -> bool:
            return policy_1(primitive, *avals, **params) or policy_2(primitive, *avals, **params)

        return policy
