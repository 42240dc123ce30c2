"""What is said of an executable: sizes in the text of programs, collectives, rooflines, and what XLA does not say."""

import pytest

from stagec.backends import hlo
from stagec.backends.analysis import Buffer, analyze, buffers, collectives, roofline
from stagec.backends.compilation import Hardware, cost

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


def test_collectives_in_all_computations_count_once() -> None:
    assert collectives(PROGRAM) == {
        "all-gather": {"count": 1, "bytes": 16 * 64 * 4},
        "all-reduce": {"count": 1, "bytes": 8 * 4 * 4 + 16},
        "collective-permute": {"count": 1, "bytes": 8 * 4 * 4},
        "reduce-scatter": {"count": 1, "bytes": 16 * 64 * 4},
    }


CHOICE = """
%first (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %one = f32[4]{0} all-reduce(%x), to_apply=%add
}

%second (x.1: f32[4]) -> f32[4] {
  %x.1 = f32[4]{0} parameter(0)
  ROOT %two = f32[4]{0} collective-permute(%x.1), source_target_pairs={{0,1}}
}

ENTRY %main (y: f32[4], i: s32[]) -> f32[4] {
  %y = f32[4]{0} parameter(0)
  %i = s32[] parameter(1)
  %constant = s32[] constant(INDEX)
  ROOT %choice = f32[4]{0} conditional(%WHICH, %y, %y), branch_computations={%first, %second}
}
"""


@pytest.mark.parametrize(
    ("index", "which", "kinds"),
    [
        ("0", "constant", ["all-reduce"]),
        ("1", "constant", ["collective-permute"]),
        ("7", "constant", ["collective-permute"]),
        ("-1", "constant", ["all-reduce", "collective-permute"]),
        ("0", "i", ["all-reduce", "collective-permute"]),
    ],
)
def test_branches_that_never_run_do_not_count(index: str, which: str, kinds: list[str]) -> None:
    assert list(collectives(CHOICE.replace("INDEX", index).replace("WHICH", which))) == kinds


def test_a_program_for_one_device_has_no_collectives() -> None:
    assert collectives("ENTRY %main (x: f32[2]) -> f32[2] {\n  ROOT %x = f32[2]{0} parameter(0)\n}\n") == {}


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


KNOWN = Hardware("a device", memory=100, bandwidth=1e9, flops=1e12)


def test_a_roofline_is_the_longer_of_both_bounds() -> None:
    slow_memory = {"compute_seconds": 1.0, "memory_seconds": 2.0, "seconds": 2.0, "bound": "memory"}
    assert roofline(1e12, 2e9, KNOWN) == slow_memory
    assert roofline(4e12, 2e9, KNOWN) == {**slow_memory, "compute_seconds": 4.0, "seconds": 4.0, "bound": "compute"}


def test_a_roofline_needs_all_figures() -> None:
    assert roofline("unknown", 1.0, KNOWN) == "unknown"
    assert roofline(1.0, "unknown", KNOWN) == "unknown"
    assert roofline(1.0, 1.0, Hardware("a CPU")) == "unknown"


def test_what_xla_does_not_say_is_unknown() -> None:
    nothing = analyze({}, {}, "", KNOWN)
    assert set(nothing) == {
        *("argument_bytes", "output_bytes", "alias_bytes", "temporary_bytes", "code_bytes", "peak_bytes"),
        *("flops", "bytes_accessed", "collectives", "roofline"),
    }
    assert {key: value for key, value in nothing.items() if value != "unknown"} == {"collectives": {}}
    zeros = dict.fromkeys(("argument_size_in_bytes", "peak_memory_in_bytes", "temp_size_in_bytes"), 0)
    assert analyze(zeros, {}, "", KNOWN)["argument_bytes"] == "unknown"


def test_nothing_is_told_from_unknown() -> None:
    memory = {
        "argument_size_in_bytes": 0,
        "output_size_in_bytes": 4,
        "alias_size_in_bytes": 0,
        "temp_size_in_bytes": 0,
        "generated_code_size_in_bytes": 0,
        "peak_memory_in_bytes": 0,
    }
    found = analyze(memory, {"bytes_accessed": 2e9}, "", KNOWN)
    assert (found["argument_bytes"], found["output_bytes"], found["temporary_bytes"]) == (0, 4, 0)
    # There is no program without code.
    assert (found["code_bytes"], found["peak_bytes"]) == ("unknown", "unknown")
    # XLA leaves out what it has counted as 0.
    assert (found["flops"], found["bytes_accessed"], found["roofline"]["seconds"]) == (0.0, 2e9, 2.0)


def test_custom_calls_that_compute_nothing_leave_the_sums_known() -> None:
    # XLA counts each custom call as -1 seconds and -1 operations.
    figures = {"flops": 98.0, "optimal_seconds": -1.5, "bytes accessed": 7.0}
    assert cost(figures) == {}
    assert cost(figures, idle=2) == {"bytes_accessed": 7.0, "flops": 100.0, "optimal_seconds": 0.5}
    assert cost(figures, idle=1) == {}
