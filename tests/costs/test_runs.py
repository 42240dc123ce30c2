"""How often each instruction runs, and what a run of it computes.

Modules: `costs/totals.py`.
"""

from stagec.costs import hlo, totals

PROGRAM = """HloModule m, entry_computation_layout={(f32[64,64]{1,0})->f32[64,64]{1,0}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (carry: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {
  %carry = (s32[], f32[64,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = f32[64,64]{1,0} get-tuple-element(%carry), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %product = f32[64,64]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = (s32[], f32[64,64]{1,0}) tuple(%next, %product)
}

%condition (carry: (s32[], f32[64,64])) -> pred[] {
  %carry = (s32[], f32[64,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %limit = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (p: f32[64,64]) -> f32[64,64] {
  %p = f32[64,64]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[64,64]{1,0}) tuple(%zero, %p)
  %loop = (s32[], f32[64,64]{1,0}) while(%start), condition=%condition, body=%body
  %last = f32[64,64]{1,0} get-tuple-element(%loop), index=1
  ROOT %twice = f32[64,64]{1,0} add(%last, %last)
}
"""


def test_what_runs_how_often() -> None:
    runs = totals.runs(hlo.parse(PROGRAM), 1)
    size = 64 * 64 * 4
    assert runs == {
        "next": totals.Runs(7, 1, 12, 0),
        "product": totals.Runs(7, 2 * 64**3, 3 * size, 2 * 64**3),
        "less": totals.Runs(8, 1, 9, 0),
        "twice": totals.Runs(1, 64 * 64, 3 * size, 0),
    }
    cost = totals.count(PROGRAM, 1, lambda _: 0.0)
    assert sum((run.times or 0) * (run.flops or 0) for run in runs.values()) == cost.flops


def test_what_is_not_known_how_often() -> None:
    runs = totals.runs(hlo.parse(PROGRAM.replace("%limit = s32[] constant(7)", "%limit = s32[] add(%i, %i)")), 1)
    assert (runs["product"].times, runs["less"].times, runs["twice"].times) == (None, None, 1)
