"""Which devices exchange arrays, in every form in which XLA writes it, and what is one exchange."""

import itertools

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from stagec.costs import collectives, hlo, totals
from stagec.costs.collectives import Exchange, groups, sent_bytes
from stagec.stages.exported import Exported
from stagec.stages.lowering import lower_exported


@pytest.mark.parametrize(
    ("among", "devices", "expected"),
    [
        ("{}", 3, [[0, 1, 2]]),
        ("{{0,2},{1,3}}", 4, [[0, 2], [1, 3]]),
        ("[2,4]<=[8]", 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", 8, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[2,4]<=[2,2,2]T(1,0,2)", 8, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['x'=2,'y'=4] {'y'}", 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['x'=2,'y'=4] {'x'}", 8, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['x'=2,'y'=4] {'y','x'}", 8, [[0, 4, 1, 5, 2, 6, 3, 7]]),
        ("mesh['x'=2,'y'=4] {'y':(2)2}", 8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['x'=2,'y'=4] {'x','y':(1)2}", 8, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['x'=8] {'x':(1)2,'x':(4)2}", 8, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'y'}", 4, [[0, 2], [1, 3]]),
        ("mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'x'}", 4, [[0, 1], [2, 3]]),
    ],
)
def test_groups(among: str, devices: int, expected: list[list[int]]) -> None:
    assert list(map(list, groups(among, devices))) == expected


@pytest.mark.parametrize(
    ("kind", "among", "sent"),
    [
        ("all-gather", "[2,4]<=[8]", 300),
        ("reduce-scatter", "[2,4]<=[8]", 300),
        ("all-reduce", "[2,4]<=[8]", 600),
        ("all-to-all", "[2,4]<=[8]", 300),
        ("collective-broadcast", "[2,4]<=[8]", 400),
        ("collective-permute", "{{0,1},{1,1}}", 400),
        ("collective-permute", "{{0,0},{1,1}}", 0),
        ("all-reduce", "{{0},{1},{2}}", 0),
        ("all-gather", "{{0,1},{2}}", 200),
    ],
)
def test_sent_bytes(kind: str, among: str, sent: int) -> None:
    assert sent_bytes(Exchange(kind, 400, among), 8) == sent


SIZES = {"a": 2, "b": 4, "c": 2}


@pytest.mark.parametrize("axes", [(), *itertools.combinations(SIZES, 1), *itertools.combinations(SIZES, 2)])
def test_groups_are_those_of_the_axes_that_are_gathered(axes: tuple[str, ...]) -> None:
    mesh = AbstractMesh(tuple(SIZES.values()), tuple(SIZES), (jax.sharding.AxisType.Auto,) * 3)
    kept = tuple(name for name in SIZES if name not in axes)
    before, after = (NamedSharding(mesh, PartitionSpec(names)) for names in ((*kept, *axes), kept))
    function = jax.jit(lambda x: x * 2, in_shardings=before, out_shardings=after)
    exported = jax.export.export(function, platforms=["cpu"])(jax.ShapeDtypeStruct((64, 8), jnp.float32))
    compiled = lower_exported(Exported.deserialize(exported.serialize()), "cpu", {}).compile()
    program = hlo.parse(compiled.as_text())
    found = [
        exchange
        for computation in program.computations.values()
        for one in computation.instructions.values()
        if (exchange := collectives.exchange(one, computation, fused=False))
    ]
    assert [one.kind for one in found] == ["all-gather"] * bool(axes)
    number = {
        place: i for i, place in enumerate(itertools.product(*(range(size) for size in SIZES.values())))
    }  # of a device, by its place in the mesh
    expected: dict[tuple[int, ...], list[int]] = {}
    for place, i in number.items():
        others = tuple(at for name, at in zip(SIZES, place, strict=True) if name not in axes)
        expected.setdefault(others, []).append(i)
    for one in found:
        assert sorted(map(sorted, groups(one.among, 16))) == sorted(expected.values())


PARTS = """
HloModule jit_f

%begin (p: bf16[1,8]) -> (bf16[1,8], bf16[4,8]) {
  %p = bf16[1,8]{1,0} parameter(0)
  %gather.1 = bf16[4,8]{1,0} all-gather(%p), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}, ATTRIBUTES
  ROOT %start = (bf16[1,8]{1,0}, bf16[4,8]{1,0}) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%middle (p.1: bf16[1,8], q: f32[8]) -> (f32[8], bf16[4,8]) {
  %p.1 = bf16[1,8]{1,0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %sum = f32[8]{0} add(%q, %q)
  %gather.2 = bf16[4,8]{1,0} all-gather(%p.1), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}, ATTRIBUTES
  ROOT %both = (f32[8]{0}, bf16[4,8]{1,0}) tuple(%sum, %gather.2)
}

%end (p.2: bf16[1,8], q.1: bf16[4,8]) -> bf16[4,8] {
  %p.2 = bf16[1,8]{1,0} parameter(0)
  %q.1 = bf16[4,8]{1,0} parameter(1)
  %gather.3 = bf16[4,8]{1,0} all-gather(%p.2), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}, ATTRIBUTES
  ROOT %done = bf16[4,8]{1,0} custom-call(%p.2, %q.1, %gather.3), custom_call_target="AsyncCollectiveDone"
}

%scatter (p.3: f32[16]) -> f32[4] {
  %p.3 = f32[16]{0} parameter(0)
  %reduced = f32[16]{0} all-reduce(%p.3), channel_id=3, replica_groups={{0,1,2,3}}, to_apply=%add
  %id = u32[] partition-id()
  ROOT %part = f32[4]{0} dynamic-slice(%reduced, %id), dynamic_slice_sizes={4}
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (x: bf16[1,8], y: f32[8], z: f32[16]) -> (bf16[4,8], f32[4]) {
  %x = bf16[1,8]{1,0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %z = f32[16]{0} parameter(2)
  %one = (bf16[1,8]{1,0}, bf16[4,8]{1,0}) fusion(%x), kind=kCustom, calls=%begin
  %alias = bf16[1,8]{1,0} get-tuple-element(%one), index=0
  %two = (f32[8]{0}, bf16[4,8]{1,0}) fusion(%alias, %y), kind=kOutput, calls=%middle
  %whole = bf16[4,8]{1,0} get-tuple-element(%two), index=1
  %three = bf16[4,8]{1,0} fusion(%alias, %whole), kind=kCustom, calls=%end
  %four = f32[4]{0} fusion(%z), kind=kCustom, calls=%scatter
  ROOT %out = (bf16[4,8]{1,0}, f32[4]{0}) tuple(%three, %four)
}
"""


def test_parts_of_one_exchange_in_several_fusions_are_one() -> None:
    text = PARTS.replace("ATTRIBUTES", 'use_global_device_ids=true, frontend_attributes={chain_id="5"}')
    found = totals.count(text, 4, lambda exchange: 1.0)
    assert found.collectives == {
        "all-gather": {"count": 1, "bytes": 64, "sent_bytes": 48},
        # What XLA:TPU writes for a reduce-scatter.
        "reduce-scatter": {"count": 1, "bytes": 64, "sent_bytes": 48},
    }
    assert found.seconds == 2.0
    # The array is read once and written once, whatever goes on meanwhile: the addition, and the other exchange.
    assert found.bytes == (16 + 64) + (32 + 32) + (64 + 16)


def test_other_exchanges_in_fusions_are_several() -> None:
    assert (
        totals.count(PARTS.replace(", ATTRIBUTES", ""), 4, lambda exchange: 1.0).collectives["all-gather"]["count"] == 3
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "%s = ((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%x), channel_id=1, replica_groups={{0,1,2,3}}, "
            "dimensions={0}, to_apply=%add",
            Exchange("reduce-scatter", 32, "{{0,1,2,3}}"),
        ),
        ("%s = f32[2]{0} reduce-scatter-done(%x)", None),
        (
            "%s = (f32[8]{0}, f32[32]{0}) all-gather-start(%x), replica_groups=[1,4]<=[4], dimensions={0}",
            Exchange("all-gather", 128, "[1,4]<=[4]"),
        ),
        (
            "%s = f32[8]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}",
            Exchange("collective-permute", 32, "{{0,1},{1,0}}"),
        ),
        ("%s = f32[8]{0} collective-permute(%x), channel_id=1, source_target_pairs={}", None),
        (
            "%s = (f32[8]{0}, u32[], token[]) send(%x, %t), channel_id=1, "
            'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1}}"}',
            Exchange("collective-permute", 32, "{{0,1}}"),
        ),
        (
            "%s = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) "
            "{'a'}, use_global_device_ids=true, to_apply=%add",
            Exchange("all-reduce", 32, "mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}"),
        ),
        ("%s = f32[8]{0} all-reduce(%x), replica_groups={}, to_apply=%add", Exchange("all-reduce", 32, "{}")),
        ("%s = f32[8]{0} all-reduce(%x), replica_groups=new[4] <a>, to_apply=%add", Exchange("all-reduce", 32, "")),
    ],
)
def test_an_instruction(text: str, expected: Exchange | None) -> None:
    head = "ENTRY %main (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n  %t = token[] after-all()\n"
    program = hlo.parse(f"{head}  ROOT {text}\n}}\n")
    computation = program.computations["main"]
    assert collectives.exchange(computation.root, computation, fused=False) == expected


def test_devices_that_cannot_be_read_are_not_guessed() -> None:
    text = "ENTRY %main (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n"
    found = totals.count(
        f"{text}  ROOT %r = f32[8]{{0}} all-gather(%x), replica_groups=new[4] <a>\n}}\n", 4, lambda _: 1.0
    )
    assert found.collectives == {"all-gather": {"count": 1, "bytes": 32, "sent_bytes": None}}
    assert (found.seconds, found.unknown) == (None, ("which devices exchange arrays in an all-gather",))


ASYNCHRONOUS = """
%wrapped (a: f32[8,4], b: f32[4,16]) -> f32[8,16] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[4,16]{1,0} parameter(1)
  ROOT %dot = f32[8,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[8,4], y: f32[4,16]) -> f32[8,16] {
  %x = f32[8,4]{1,0} parameter(0)
  %y = f32[4,16]{1,0} parameter(1)
  %start = ((f32[8,4]{1,0}, f32[4,16]{1,0}), f32[8,16]{1,0}, u32[]) START
  ROOT %end = f32[8,16]{1,0} END(%start)
}
"""


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("async-start(%x, %y), calls=%wrapped", "async-done"),
        ("call-start(%x, %y), to_apply=%wrapped", "call-done"),
        ("fusion-start(%x, %y), kind=kOutput, calls=%wrapped", "fusion-done"),
        ("dot-start(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}", "dot-done"),
    ],
)
def test_what_goes_on_beside_other_things_counts_once(start: str, end: str) -> None:
    found = totals.count(ASYNCHRONOUS.replace("START", start).replace("END", end), 1, lambda exchange: None)
    assert (found.flops, found.bytes) == (2 * 8 * 4 * 16, 4 * (8 * 4 + 4 * 16 + 8 * 16))


def test_a_copy_that_goes_on_beside_other_things_reads_and_writes_once() -> None:
    text = """
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %start = (f32[8]{0:S(1)}, f32[8]{0}, u32[]{:S(2)}) copy-start(%x)
  %near = f32[8]{0:S(1)} copy-done(%start)
  %slice-start = ((f32[8]{0}), f32[2]{0:S(1)}, s32[]{:S(2)}) slice-start(%x), slice={[0:2]}
  %part = f32[2]{0:S(1)} slice-done(%slice-start)
  %back = (f32[8]{0}, f32[8]{0:S(1)}, u32[]{:S(2)}) copy-start(%near)
  ROOT %far = f32[8]{0} copy-done(%back)
}
"""
    # Only what is in main memory: the array read, a quarter of it read once more, and the array written.
    assert totals.count(text, 1, lambda exchange: None).bytes == 32 + 8 + 32


@pytest.mark.parametrize(
    ("kind", "among", "axes"),
    [
        ("all-reduce", "{{0,1},{2,3}}", "model"),
        ("all-reduce", "[2,2]<=[2,2]T(1,0)", "data"),
        ("all-gather", "{}", "data, model"),
        ("all-reduce", "{{0,3},{1,2}}", ""),
        ("collective-permute", "{{0,2},{2,0}}", "data"),
        ("all-to-all", "mesh['data'=2,'model'=2] {'model'}", "model"),
        ("all-reduce", "", ""),
    ],
)
def test_along_which_axes(kind: str, among: str, axes: str) -> None:
    assert collectives.axes(kind, among, {"data": 2, "model": 2}) == axes
