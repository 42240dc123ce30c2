"""What is said of an executable: sizes in the text of programs, buffers, rooflines, and what is not known.

Modules: `backends/compilation.py`.
"""

import pytest

from stagec.backends.analysis import Buffer, analyze, buffers, roofline
from stagec.backends.compilation import Hardware, cost
from stagec.costs import hlo
from stagec.costs.links import Links, Switch

PROGRAM = """
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8,4]{1,0}, f32[4]{0})->(f32[8,4]{1,0}, f32[4]{0})}

%fused (p: f32[8,4]) -> f32[8,64] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %big = f32[8,64]{1,0} broadcast(%p), dimensions={0}
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %state = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%state), index=1
  %moved = f32[8,4]{1,0} collective-permute(%x), channel_id=3, source_target_pairs={{0,1},{1,0}}
  ROOT %next = (s32[], f32[8,4]{1,0}) tuple(%i, %moved)
}

ENTRY %main (w: f32[8,4], b.1: f32[4]) -> (f32[8,4], f32[4]) {
  %w = f32[8,4]{1,0} parameter(0), metadata={op_name="params[\\'w\\']"}
  %b.1 = f32[4]{0} parameter(1)
  %fusion = f32[8,64]{1,0} fusion(%w), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/broadcast"}
  %start = (f32[8,64]{1,0}, f32[16,64]{1,0}) all-gather-start(%fusion), channel_id=1, dimensions={0}
  %done = f32[16,64]{1,0} all-gather-done(%start)
  %both = (f32[8,4]{1,0}, f32[4]{0}) all-reduce(%w, %b.1), to_apply=%add, metadata={op_name="all-to-all(x"}
  %part = f32[8,32]{1,0} reduce-scatter(%done), channel_id=4, dimensions={1}, to_apply=%add
  %first = f32[8,4]{1,0} get-tuple-element(%both), index=0
  %second = f32[4]{0} get-tuple-element(%both), index=1
  ROOT %out = (f32[8,4]{1,0}, /*index=1*/f32[4]{0}) tuple(%first, %second)
}
"""


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("f32[8,4]{1,0}", 128),
        ("f32[]", 4),
        ("pred[3]{0}", 3),
        ("bf16[2,3]", 12),
        ("c128[2]{0}", 32),
        ("f8e4m3fn[10]{0}", 10),
        ("f8e4m3b11fnuz[10]{0}", 10),
        ("s4[3]{0}", 3),
        ("s4[3]{0:E(4)}", 2),
        ("u32[0,5]{1,0}", 0),
        ("s32[<=8]{0}", 32),
        ("token[]", 0),
        ("(f32[4]{0}, (s32[], bf16[2]{0}), token[])", 24),
        # Tiles of TPUs: the last two dimensions are rounded up, in the order of the layout.
        ("f32[16,64]{1,0:T(8,128)}", 16 * 128 * 4),
        ("f32[16,64]{0,1:T(8,128)}", 64 * 128 * 4),
        ("bf16[3,16,64]{2,1,0:T(8,128)(2,1)S(1)}", 3 * 16 * 128 * 2),
        ("f32[64]{0:T(128)}", 512),
        ("f32[]{:T(128)}", 512),
    ],
)
def test_sizes_of_types(text: str, bytes_: int) -> None:
    assert hlo.size(text) == bytes_


def test_sizes_without_padding() -> None:
    assert hlo.size("(f32[16,64]{1,0:T(8,128)}, f32[]{:T(128)})", padded=False) == 16 * 64 * 4 + 4


def test_elements_of_a_tuple() -> None:
    tiled, inner = "f32[8,128]{1,0:T(8,128)(2,1)S(1)}", "(s32[], bf16[2]{0}, token[])"
    assert hlo.parts(f"({tiled}, {inner}, /*index=2*/pred[])") == [tiled, inner, "pred[]"]
    assert hlo.parts("(f32[])") == ["f32[]"]


def test_collectives_of_a_program() -> None:
    # The start and the end of one are one; an instruction of two arrays is one; the loop's body is never called.
    assert analyze({}, PROGRAM, Hardware("a CPU"), devices=2)["collectives"] == {
        "all-gather": {"count": 1, "bytes": 16 * 64 * 4, "sent_bytes": 8 * 64 * 4},
        "all-reduce": {"count": 1, "bytes": 8 * 4 * 4 + 16, "sent_bytes": 8 * 4 * 4 + 16},
        "reduce-scatter": {"count": 1, "bytes": 16 * 64 * 4, "sent_bytes": 8 * 64 * 4},
    }


def test_the_largest_buffers_are_those_that_exist() -> None:
    # Of the loop's body, only what it makes; of fusions and reductions, nothing.
    assert buffers(PROGRAM) == [
        Buffer("temporary", -1, "all-gather-done", "f32[16,64]", 4096),
        Buffer("temporary", -1, "jit(f)/broadcast", "f32[8,64]", 2048),
        Buffer("temporary", -1, "reduce-scatter", "f32[8,32]", 1024),
        Buffer("argument", 0, "params['w']", "f32[8,4]", 128),
        Buffer("result", 0, "", "f32[8,4]", 128),
        Buffer("temporary", -1, "collective-permute", "f32[8,4]", 128),
        Buffer("argument", 1, "", "f32[4]", 16),
        Buffer("result", 1, "", "f32[4]", 16),
    ]


KNOWN = Hardware("a device", memory=100, bandwidth=1e9, flops=1e12, links=Links(Switch(1e3), 2))


@pytest.mark.parametrize(
    ("flops", "bytes_", "links", "seconds", "bound"),
    [(1e12, 2e9, 0.0, 2.0, "memory"), (4e12, 2e9, 3.0, 4.0, "compute"), (4e12, 2e9, 5.0, 5.0, "links")],
)
def test_a_roofline_is_the_longest_of_all_bounds(
    flops: float, bytes_: float, links: float, seconds: float, bound: str
) -> None:
    parts = {"compute_seconds": flops / 1e12, "memory_seconds": bytes_ / 1e9, "link_seconds": links}
    assert roofline(flops, bytes_, links, KNOWN) == {**parts, "seconds": seconds, "bound": bound}


def test_a_roofline_needs_all_figures() -> None:
    assert roofline(None, 1.0, 0.0, KNOWN) == "unknown"
    assert roofline(1.0, None, 0.0, KNOWN) == "unknown"
    assert roofline(1.0, 1.0, None, KNOWN) == "unknown"
    assert roofline(1.0, 1.0, 0.0, Hardware("a CPU")) == "unknown"


def test_what_bounds_a_program_is_in_its_analysis() -> None:
    found = analyze({}, PROGRAM, KNOWN, devices=2)
    sent = sum(moved["sent_bytes"] for moved in found["collectives"].values())
    assert (found["roofline"]["link_seconds"], found["roofline"]["bound"]) == (sent / 1e3, "links")
    assert found["unknown"] == []


def test_links_of_which_nothing_is_known_are_told() -> None:
    found = analyze({}, PROGRAM, Hardware("Device X", bandwidth=1e9, flops=1e12, links=Links(None, 2)), devices=2)
    assert (found["roofline"], found["unknown"]) == ("unknown", ["how fast the links of Device X are"])


def test_what_xla_does_not_say_is_unknown() -> None:
    nothing = analyze({}, "", KNOWN)
    assert list(nothing) == [
        *("argument_bytes", "output_bytes", "alias_bytes", "temporary_bytes", "code_bytes", "peak_bytes"),
        *("flops", "bytes_accessed", "collectives", "roofline", "unknown"),
    ]
    assert {key for key, value in nothing.items() if value == "unknown"} == set(list(nothing)[:6])
    zeros = dict.fromkeys(("argument_size_in_bytes", "peak_memory_in_bytes", "temp_size_in_bytes"), 0)
    assert analyze(zeros, "", KNOWN)["argument_bytes"] == "unknown"


def test_nothing_is_told_from_unknown() -> None:
    memory = {
        "argument_size_in_bytes": 0,
        "output_size_in_bytes": 4,
        "alias_size_in_bytes": 0,
        "temp_size_in_bytes": 0,
        "generated_code_size_in_bytes": 0,
        "peak_memory_in_bytes": 0,
    }
    found = analyze(memory, "", KNOWN)
    assert (found["argument_bytes"], found["output_bytes"], found["temporary_bytes"]) == (0, 4, 0)
    # There is no program without code.
    assert (found["code_bytes"], found["peak_bytes"]) == ("unknown", "unknown")
    assert (found["flops"], found["bytes_accessed"], found["roofline"]["seconds"]) == (0, 0, 0)


def test_custom_calls_that_compute_nothing_leave_the_sums_known() -> None:
    # XLA counts each custom call as -1 seconds and -1 operations.
    metrics = {"flops": 98.0, "optimal_seconds": -1.5, "bytes accessed": 7.0}
    assert cost(metrics) == {}
    assert cost(metrics, idle=2) == {"bytes_accessed": 7.0, "flops": 100.0, "optimal_seconds": 0.5}
    assert cost(metrics, idle=1) == {}
