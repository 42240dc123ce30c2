"""Optimized programs of devices on CPUs: short ones, whose results are known.

Modules: `stagec_insight/bitcasts.py`, `stagec_insight/hlo_writer.py`, `stagec_insight/emulation.py`,
`costs/array_types.py`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from jaxlib import _hlo

from stagec.core.messages.refusal import LoadError
from stagec_insight import emulation
from stagec_insight.emulation import NotCovered

RNG = np.random.default_rng(0)


def run(text: str, *arrays: np.ndarray, results: Sequence[Any] = (), count: int = 1) -> list[np.ndarray]:
    """Run HLO text; results: arrays of the shapes and dtypes that it gives."""
    module = _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    parameters, given = ([(array.shape, array.dtype) for array in some] for some in (arrays, results))
    executable = emulation.load(module, parameters, given, count)
    made = executable.run([executable.put(i, array) for i, array in enumerate(arrays)])
    return [np.asarray(result.numpy()) for result in made]


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def test_a_bitcast_is_by_layout() -> None:
    text = """HloModule m
ENTRY %e {
  %x = f32[4,6]{0,1} parameter(0)
  ROOT %b = f32[2,12]{1,0} bitcast(%x)
}"""
    x = normal(4, 6)
    (result,) = run(text, x, results=[np.empty((2, 12), np.float32)])
    np.testing.assert_array_equal(result, x.T.reshape(2, 12))


def in_memory(x: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """An array of two dimensions tile by tile, each tile padded to its size."""
    rows, columns = (-(-size // along) for size, along in zip(x.shape, tile, strict=True))
    filled = np.zeros((rows * tile[0], columns * tile[1]), x.dtype)
    filled[: x.shape[0], : x.shape[1]] = x
    return filled.reshape(rows, tile[0], columns, tile[1]).transpose(0, 2, 1, 3)


def test_a_bitcast_is_by_tiles() -> None:
    text = """HloModule m
ENTRY %e {
  %x = f32[8,256]{1,0:T(8,128)} parameter(0)
  ROOT %b = f32[2,8,128]{2,1,0:T(8,128)} bitcast(%x)
}"""
    x = normal(8, 256)
    (result,) = run(text, x, results=[np.empty((2, 8, 128), np.float32)])
    np.testing.assert_array_equal(result, in_memory(x, (8, 128)).reshape(2, 8, 128))


def test_a_bitcast_that_fills_tiles_up_keeps_its_elements() -> None:
    text = """HloModule m
ENTRY %e {
  %x = bf16[5,3,130]{2,1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[5,1,3,130]{3,2,1,0:T(8,128)(2,1)} bitcast(%x)
  ROOT %c = f32[5,1,3,130]{3,2,1,0} convert(%b)
}"""
    import ml_dtypes

    x = normal(5, 3, 130).astype(ml_dtypes.bfloat16)
    (result,) = run(text, x, results=[np.empty((5, 1, 3, 130), np.float32)])
    np.testing.assert_array_equal(result, x.reshape(5, 1, 3, 130).astype(np.float32))


def test_a_bitcast_to_another_dtype() -> None:
    text = """HloModule m
ENTRY %e {
  %x = u8[4,8]{1,0} parameter(0)
  ROOT %b = s32[4,2]{1,0} bitcast(%x)
}"""
    x = RNG.integers(0, 256, (4, 8)).astype(np.uint8)
    (result,) = run(text, x, results=[np.empty((4, 2), np.int32)])
    np.testing.assert_array_equal(result, x.view(np.int32))


ASYNC = """HloModule m, is_scheduled=true
%fused (p: f32[4], q: f32[4]) -> (f32[4], f32[4]) {
  %p = f32[4]{0} parameter(0)
  %q = f32[4]{0} parameter(1)
  %s = f32[4]{0} subtract(%p, %q)
  %c = f32[4]{0} copy(%q)
  ROOT %t = (f32[4]{0}, f32[4]{0}) tuple(%s, %c)
}
%inside (i: f32[4]) -> f32[4] {
  %i = f32[4]{0} parameter(0)
  ROOT %n = f32[4]{0} negate(%i)
}
ENTRY %e {
  %x = f32[4]{0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %begun = (f32[4]{0}, f32[4]{0}, u32[]) copy-start(%x)
  %f = (f32[4]{0}, f32[4]{0}) fusion(%x, %y), kind=kLoop, calls=%fused, backend_config={"a":{"b":"c, d"}}
  %copied = f32[4]{0} copy-done(%begun)
  %running = ((f32[4]{0}), f32[4]{0}, s32[]) async-start(%copied), async_execution_thread="other", calls=%inside
  %on = ((f32[4]{0}), f32[4]{0}, s32[]) async-update(%running)
  %done = f32[4]{0} async-done(%on)
  %a = f32[4]{0} get-tuple-element(%f), index=0
  ROOT %r = (f32[4]{0}, f32[4]{0}) tuple(%a, %done)
}"""


def test_fusions_and_what_runs_beside() -> None:
    x, y = normal(4), normal(4)
    a, b = run(ASYNC, x, y, results=[x, x])
    np.testing.assert_array_equal(a, x - y)
    np.testing.assert_array_equal(b, -x)


# The mesh is [4,2]; arrays are split over its first axis.
SPLIT = """HloModule m, num_partitions=8
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
ENTRY %e {
  %x = f32[2,3]{1,0} parameter(0)
  %id = u32[] partition-id()
  %replica = u32[] replica-id()
  %which = u32[] add(%id, %replica)
  %number = f32[] convert(%which)
  %numbers = f32[2,3]{1,0} broadcast(%number), dimensions={}
  %sum = f32[2,3]{1,0} all-reduce-start(%x), channel_id=1,
    replica_groups=[2,4]<=[4,2]T(1,0), use_global_device_ids=true, to_apply=%add
  %summed = f32[2,3]{1,0} all-reduce-done(%sum)
  %begun = ((f32[2,3]{1,0}, f32[2,3]{1,0}), (f32[8,3]{1,0}, f32[8,3]{1,0})) all-gather-start(%x, %numbers),
    channel_id=2, replica_groups=mesh['x'=4,'y'=2] {'x'}, dimensions={0}, use_global_device_ids=true
  %gathered = (f32[8,3]{1,0}, f32[8,3]{1,0}) all-gather-done(%begun)
  %whole = f32[8,3]{1,0} get-tuple-element(%gathered), index=0
  %ids = f32[8,3]{1,0} get-tuple-element(%gathered), index=1
  %passed = f32[2,3]{1,0} collective-permute(%x), channel_id=3,
    source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}
  ROOT %r = (f32[2,3]{1,0}, f32[8,3]{1,0}, f32[8,3]{1,0}, f32[2,3]{1,0}) tuple(%summed, %whole, %ids, %passed)
}"""


def test_collectives_of_a_partitioned_program() -> None:
    module = _hlo.hlo_module_from_text(SPLIT)
    x = normal(8, 3)
    text = emulation.for_cpus(emulation.readable(module), 8)
    assert "replica_groups={{0,2,4,6},{1,3,5,7}}" in text
    # Shardings are the device's compiler's; here each device has the same, and one part is looked at.
    rows = x[:2]
    summed, whole, ids, passed = run(SPLIT, rows, results=[rows, x, x, rows], count=8)
    np.testing.assert_allclose(summed, 4 * rows, rtol=1e-6)
    np.testing.assert_array_equal(whole, np.tile(rows, (4, 1)))
    np.testing.assert_array_equal(ids, np.repeat(np.float32([0, 2, 4, 6]), 2)[:, None] * np.ones(3, np.float32))
    np.testing.assert_array_equal(passed, rows)


def test_floats_of_another_width_are_converted() -> None:
    """As XLA:TPU has them: between a fusion and its operands, and inside it."""
    text = """HloModule m
%f (p: bf16[4]) -> bf16[6] {
  %p = bf16[4]{0} parameter(0)
  %z = f32[] constant(1)
  ROOT %r = bf16[6]{0} pad(%p, %z), padding=1_1
}
ENTRY %e (x: f32[4]) -> f32[6] {
  %x = f32[4]{0} parameter(0)
  %y = bf16[6]{0} fusion(%x), kind=kLoop, calls=%f
  ROOT %r = f32[6]{0} copy(%y)
}"""
    rewritten = _hlo.hlo_module_from_text(emulation.for_cpus(text))
    x = np.float32([1 + 2**-12, 2, 3, 4])
    (result,) = run(rewritten.to_string(), x, results=[np.empty(6, np.float32)])
    np.testing.assert_array_equal(result, [1, 1, 2, 3, 4, 1])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('custom-call(%x), custom_call_target="mine"', 'custom-call "mine": it has no reference implementation'),
        ("rng-get-and-update-state(), delta=1", "rng-get-and-update-state: its state is the device's"),
        ("fusion(%x), kind=kLoop, calls=%other", "fusion: f32[4,2]{1,0} is passed as f32[4,2]{0,1}"),
    ],
)
def test_what_has_no_form_is_refused_by_name(line: str, why: str) -> None:
    text = f"""HloModule m
%other (p: f32[4,2]) -> f32[4,2] {{
  ROOT %p = f32[4,2]{{0,1}} parameter(0)
}}

ENTRY %e (x: f32[4,2]) -> f32[4,2] {{
  %x = f32[4,2]{{1,0}} parameter(0)
  %bad = f32[4,2]{{1,0}} {line}
  ROOT %r = f32[4,2]{{1,0}} add(%bad, %x)
}}"""
    with pytest.raises(NotCovered) as refused:
        emulation.for_cpus(text)
    assert refused.value.reasons == {"bad": why}


def test_what_xla_does_not_take_is_told() -> None:
    text = "HloModule m\nENTRY %e {\n  %x = f32[4]{0} parameter(0)\n  ROOT %r = f32[4]{0} copy(%x)\n}"
    module = _hlo.hlo_module_from_text(text)
    broken = emulation.readable(module).replace("copy(%x)", "negate(%x), dimensions={7}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulation, "readable", lambda _: broken)
        with pytest.raises(LoadError) as refused:
            run(text, normal(4), results=[normal(4)])
    assert refused.value.code == "executable"
    assert str(refused.value).startswith("XLA does not take it for CPUs: ")


@pytest.mark.parametrize(
    ("aliases", "donated", "told"),
    [
        ("{0}: (0, {}, may-alias)", [0], {}),
        ("{0}: (1, {}, may-alias)", [0], {"result 0": "it takes the memory of parameter 1, which is not donated"}),
        (
            "{0}: (0, {}, may-alias), {1}: (0, {}, must-alias)",
            [0],
            {"result 1": "it takes the memory of parameter 0, as result 0 does"},
        ),
        ("{1}: (1, {}, may-alias)", [1], {"result 1": "f32[4]{0} takes the memory of f32[2]{0}"}),
    ],
)
def test_memory_of_parameters_is_taken_once_and_where_it_may(
    aliases: str, donated: list[int], told: dict[str, str]
) -> None:
    types = "entry_computation_layout={(f32[4]{0}, f32[2]{0})->(f32[2]{0}, f32[4]{0})}"
    text = f"HloModule m, is_scheduled=true, input_output_alias={{ {aliases} }}, {types}\n"
    if not told:
        emulation.check_aliases(text, donated)
        return
    with pytest.raises(NotCovered) as refused:
        emulation.check_aliases(text, donated)
    assert refused.value.reasons == told
