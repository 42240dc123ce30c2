"""Planning: the artifacts, their specs, the checks across a function, and how light it is.

Modules: `cli/actions/plan.py`, `core/builds/frontends.py`, `core/builds/naming.py`, `core/builds/specs.py`,
`manifest/checks.py`, `manifest/planning.py`.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from stagec.core.builds.specs import Limits, executable_spec, function_spec, to_json
from stagec.core.messages.errors import StagecError
from stagec.hardware import cuda as gpus, tpu as tpus
from stagec.manifest import Plan, describe, load_manifest, plan

COMPILER = Path(__file__).absolute().parents[2] / "compiler"

MANIFEST = """
[manifest]
name = "m"
version = "1.2.0"

[targets.old]
platform = "cpu"
isa = "SSE4_2"
parallelism = 2
compiler_options = { xla_cpu_enable_fast_math = false }
[targets.new]
platform = "cpu"
isa = "AVX2"

[functions.scale]
entry = "pkg.mod:scale"
args = [{ w = "f32[64, 10]" }, "f32[batch, seq]"]
targets = ["old", "new"]
buckets = { seq = [128], batch = [8, 1] }
static = { power = 2 }

[functions.apply]
entry = "pkg.mod:apply"
avals = "pkg.mod:apply_avals"
platforms = ["tpu", "cpu"]
donate_argnames = ["state"]
"""


def plan_of(text: str, folder: Path) -> Plan:
    """The plan of a manifest, under the name m.toml."""
    path = folder / "manifest.toml"
    path.write_text(text, encoding="utf-8")
    return plan(load_manifest(path, "m.toml"))


def test_more_executables_than_a_manifest_may_have(tmp_path: Path) -> None:
    """Four lists of a hundred sizes are a hundred million executables: planning them took hours."""
    head = '[manifest]\nname = "m"\nversion = "1"\n[targets.cpu]\nplatform = "cpu"\nisa = "AVX2"\n'
    sizes = list(range(1, 101))

    def function(name: str, dims: str, targets: str = '"cpu"') -> str:
        buckets = ", ".join(f"{dim} = {sizes}" for dim in dims)
        args = f'args = ["f32[{",".join(dims)}]"]\ntargets = [{targets}]\ngolden = {{}}'
        return f'[functions.{name}]\nentry = "a:b"\n{args}\nbuckets = {{ {buckets} }}\n'

    started = time.process_time()
    functions = function("f", "abcd"), function("g", "ab", '"cpu", "cpu-avx512"'), function("h", "a")
    with pytest.raises(StagecError) as caught:
        plan_of(head + "".join(functions), tmp_path)
    write = "\n  list fewer sizes; where padding is declared, calls of other sizes run in the next larger one"
    four, two = (" x ".join(f"100 sizes of {dim}" for dim in dims) for dims in ("abcd", "ab"))
    assert [str(problem) for problem in caught.value.problems] == [
        f"m.toml: functions.f.buckets: {four} are 100,000,000 executables, and a manifest may have 10,000{write}",
        f"m.toml: functions.g.buckets: {two} x 2 targets are 20,000 executables, and a manifest may have 10,000{write}",
    ]
    with pytest.raises(StagecError) as caught:
        plan_of(head + function("f", "ab") + function("h", "a"), tmp_path)
    assert str(caught.value) == dedent("""\
        m.toml: functions: they have 10,100 executables in all, and a manifest may have 10,000
          write several manifests, or list fewer sizes""")
    assert time.process_time() - started < 5


@pytest.mark.parametrize(("functions", "args", "sizes"), [(1, 2000, 3000), (40, 2000, 10)])
def test_more_shapes_than_a_manifest_may_have(tmp_path: Path, functions: int, args: int, sizes: int) -> None:
    """Two thousand arguments in three thousand buckets took 40 seconds."""

    def manifest(count: int) -> str:
        avals = [*(f"f32[b,{size}]" for size in range(1, count + 1)), "f32[7]", "f32[b,1]", "i32[b,1]"]
        table = f'entry = "a:b"\nargs = {json.dumps(avals)}\nbuckets = {{ b = {list(range(1, sizes + 1))} }}\n'
        head = '[manifest]\nname = "m"\nversion = "1"\n'
        return head + "".join(f'[functions.f{at}]\n{table}targets = ["cpu-avx2"]\n' for at in range(functions))

    started = time.process_time()
    with pytest.raises(StagecError) as caught:
        plan_of(manifest(args), tmp_path)
    count = f"{functions * args * sizes:,}"
    assert str(caught.value) == (
        f"m.toml: functions: symbolic shapes of arguments x buckets are {count}, and a manifest may have 500,000\n"
        "  write several manifests, or list fewer sizes"
    )
    assert len(plan_of(manifest(10), tmp_path).executables) == functions * sizes
    assert time.process_time() - started < 10


def test_a_plan(tmp_path: Path) -> None:
    planned = json.loads(plan_of(MANIFEST, tmp_path).to_json())
    old = {
        "name": "old",
        "platform": "cpu",
        "isa": "SSE4_2",
        "parallelism": 2,
        "compiler_options": {"xla_cpu_enable_fast_math": False},
        "examined": "here",
    }
    new = {**old, "name": "new", "isa": "AVX2", "parallelism": 8, "compiler_options": {}}
    same = {
        "manifest": "m.toml",
        "constraints": [],
        "donate_argnums": [],
        "keep_unused": False,
        "inline": False,
        "enable_x64": False,
        "vjp_order": 0,
        "variant": "",
        "mesh": [],
        "axis_types": [],
        "in_shardings": None,
        "out_shardings": None,
        "disabled_checks": [],
        "allow_custom_calls": [],
        "matmul_precision": None,
        "prng_impl": None,
        "environment": {},
        "host_callbacks": "refuse",
        "padding": {},
        "serve": {},
        "bind": {},
        "golden": {},
        "devices": [],
        "plugins": [],
        "frontend": "jax",
        "stablehlo": None,
        "computed_on": {"isa": "AVX2", "core": "generic", "parallelism": 8},
    }
    assert planned == {
        "format": 1,
        "manifest": {"name": "m", "version": "1.2.0", "reproducible": True},
        "bundle": {"name": "m", "version": "1.2.0"},
        "bundle_size": None,
        "tolerances": {},
        "jax_cache": {"executables": {}, "machines": {}},
        "jaxlib": {},
        "serves": [],
        "runs_on": [],
        "exports": [
            {
                "name": "m.apply",
                "spec": same
                | {
                    "name": "apply",
                    "entry": "pkg.mod:apply",
                    "args": [],
                    "kwargs": {},
                    "avals": "pkg.mod:apply_avals",
                    "platforms": ["tpu", "cpu"],
                    "static": {},
                    "donate_argnames": ["state"],
                },
            },
            {
                "name": "m.scale",
                "spec": same
                | {
                    "name": "scale",
                    "entry": "pkg.mod:scale",
                    "args": [{"w": "f32[64,10]"}, "f32[batch,seq]"],
                    "kwargs": {},
                    "avals": None,
                    "platforms": ["cpu"],
                    "static": {"power": 2},
                    "donate_argnames": [],
                },
            },
        ],
        "executables": [
            {
                "name": f"m.scale.{target['name']}.batch{batch}_seq128",
                "export": "m.scale",
                "spec": {
                    "function": "scale",
                    "manifest": "m.toml",
                    "target": target,
                    "bucket": {"batch": batch, "seq": 128},
                    "variant": "",
                    "limits": dataclasses.asdict(Limits()),
                },
            }
            for target in (new, old)
            for batch in (1, 8)
        ],
    }


def test_the_text_of_a_plan_is_canonical(tmp_path: Path) -> None:
    text = plan_of(MANIFEST, tmp_path).to_json()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) + "\n"
    assert text.isascii()
    head, *functions = MANIFEST.split("\n[functions.")
    reordered = "\n[functions.".join([head, *reversed(functions)])
    spaced = reordered.replace("[8, 1]", "[ 1,\n 8 ]").replace("f32[64, 10]", "f32[64,10]")
    assert plan_of(f"# a comment\n{spaced}\ndescription = 'text'\n", tmp_path).to_json() == text


def test_actions_read_the_slices_back(tmp_path: Path) -> None:
    planned = plan_of(MANIFEST, tmp_path)
    for export in planned.exports:
        assert to_json(function_spec(to_json(export.spec))) == to_json(export.spec)
    for executable in planned.executables:
        assert executable_spec(to_json(executable.spec)) == executable.spec


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("power = 2", "power = 3", {"m.scale"}),
        ("power = 2", "power = 2.0", {"m.scale"}),
        ("pkg.mod:apply_avals", "pkg.mod:other_avals", {"m.apply"}),
        ('name = "m"\nversion = "1.2.0"', 'name = "m"\nversion = "1.3.0"', set()),
        ("xla_cpu_enable_fast_math = false", "xla_cpu_enable_fast_math = true", {"m.scale.old"}),
        ("parallelism = 2", "parallelism = 3", {"m.scale.old"}),
        ("[manifest]", "[manifest]\nenable_x64 = true", {"m.scale", "m.apply"}),
    ],
)
def test_an_edit_changes_the_slices_it_should(old: str, new: str, changed: set[str], tmp_path: Path) -> None:
    def specs(text: str) -> dict[str, str]:
        planned = plan_of(text, tmp_path)
        executables = {executable.name: to_json(executable.spec) for executable in planned.executables}
        return executables | {export.name: to_json(export.spec) for export in planned.exports}

    assert MANIFEST.count(old) == 1
    before, after = specs(MANIFEST), specs(MANIFEST.replace(old, new))
    assert before.keys() == after.keys()
    edited = {name for name in before if before[name] != after[name]}
    assert {re.sub(r"\.batch\d+_seq128$", "", name) for name in edited} == changed


def test_describe(tmp_path: Path) -> None:
    assert describe(plan_of(MANIFEST, tmp_path)) == dedent(
        """\
        portable    m.apply                    tpu, cpu
        portable    m.scale                    cpu
        executable  m.scale.new.batch1_seq128  cpu AVX2, parallelism 8, batch = 1, seq = 128
        executable  m.scale.new.batch8_seq128  cpu AVX2, parallelism 8, batch = 8, seq = 128
        executable  m.scale.old.batch1_seq128  cpu SSE4_2, parallelism 2, batch = 1, seq = 128
        executable  m.scale.old.batch8_seq128  cpu SSE4_2, parallelism 2, batch = 8, seq = 128
        bundle      m                          version 1.2.0
        """
    )


def test_releases_of_jaxlib(tmp_path: Path) -> None:
    """[manifest] says them for all targets, a target for itself. An export has the StableHLO that all of them read."""
    text = MANIFEST.replace('["old", "new"]', '["old", "new", "v5e:2x2"]').replace('version = "1.2.0"', 'version = "1"')
    text = text.replace('"SSE4_2"', '"SSE4_2"\njaxlib = ["0.12.0"]')
    serves = 'serves = ["jaxlib==0.10.2", "jaxlib==0.12.0"]\nruns_on = ["0.12.0"]'
    head = f'version = "1"\njaxlib = ["0.10.2", "0.10.1"]\n{serves}'
    planned = plan_of(text.replace('version = "1"', head), tmp_path)
    everywhere = ["0.10.2", "0.10.1"]
    assert json.loads(planned.to_json())["serves"] == ["jaxlib==0.10.2", "jaxlib==0.12.0"]
    assert json.loads(planned.to_json())["runs_on"] == ["0.12.0"]
    assert json.loads(planned.to_json())["jaxlib"] == {"new": everywhere, "old": ["0.12.0"], "v5e-2x2": everywhere}
    rows = [line for line in describe(planned).splitlines() if "batch8" in line]
    assert rows[0].endswith("cpu AVX2, parallelism 8, batch = 8, seq = 128, jaxlib 0.10.2, jaxlib 0.10.1")
    assert rows[1].endswith("cpu SSE4_2, parallelism 2, batch = 8, seq = 128, jaxlib 0.12.0")
    alone = plan_of(text.replace('jaxlib = ["0.12.0"]', ""), tmp_path)
    assert alone.executables == planned.executables
    assert {export.spec.stablehlo for export in planned.exports} == {"1.17.0", None}
    older = [dataclasses.replace(export.spec, stablehlo=None) for export in planned.exports]
    assert [export.spec for export in alone.exports] == older

    sizes = ", ".join(map(str, range(1, 3001)))
    with pytest.raises(StagecError) as caught:
        plan_of(
            MANIFEST.replace("[8, 1]", f"[{sizes}]").replace('"SSE4_2"', '"SSE4_2"\njaxlib = ["1.0", "1.1", "1.2"]'),
            tmp_path,
        )
    assert str(caught.value).partition("\n")[0] == (
        "m.toml: functions.scale.buckets: 3,000 sizes of batch x 4 targets and releases of jaxlib are 12,000 "
        "executables, and a manifest may have 10,000"
    )


HEAD = """
[manifest]
name = "m"
version = "1"
[targets.cpu]
platform = "cpu"
isa = "AVX2"
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            '[functions.f]\nentry = "a:b"\nargs = ["f32[batch,2*seq]"]\ntargets = ["cpu"]',
            """\
            m.toml: functions.f.buckets: no sizes for the symbolic dimensions "batch", "seq"
              write for example buckets = { batch = [1, 8], seq = [1, 8] }""",
            id="no buckets",
        ),
        pytest.param(
            '[functions.f]\nentry = "a:b"\nargs = ["f32[batch]"]\ntargets = ["cpu"]\nbuckets = { batc = [1], x = [1] }',
            """\
            m.toml: functions.f.buckets: no sizes for the symbolic dimension "batch"
              write for example buckets = { batch = [1, 8] }
            m.toml: functions.f.buckets.batc: no aval has a dimension "batc"
              did you mean "batch"?
            m.toml: functions.f.buckets.x: no aval has a dimension "x"
              write one of batch""",
            id="buckets of other dimensions",
        ),
        pytest.param(
            '[functions.f]\nentry = "a:b"\nargs = ["f32[3]"]\ntargets = ["cpu"]\nbuckets = { batch = [1] }',
            """\
            m.toml: functions.f.buckets.batch: no aval has a dimension "batch"
              leave it out""",
            id="buckets without dimensions",
        ),
        pytest.param(
            '[functions.f]\nentry = "a:b"\nargs = []\nkwargs = { x = "f32[batch-4]" }\ntargets = ["cpu"]\n'
            'buckets = { batch = [1, 4, 8] }\nconstraints = ["batch % 4 == 0", "seq >= 1"]',
            """\
            m.toml: functions.f.constraints[1]: "seq >= 1": no aval has a dimension "seq"
              write one of batch""",
            id="constraint on another dimension",
        ),
        pytest.param(
            '[functions.f]\nentry = "a:b"\nargs = ["f32[batch]"]\ntargets = ["cpu"]\nbuckets = { batch = [8] }\n'
            'constraints = ["batch >= 8", "batch <= 4"]',
            """\
            m.toml: functions.f.constraints[1]: no sizes fulfil "batch <= 4" and the constraints before it
              change it, or leave it out""",
            id="constraints that contradict each other",
        ),
        pytest.param(
            '[functions.f]\nentry = "a:b"\nargs = []\nkwargs = { x = "f32[batch-4]" }\ntargets = ["cpu"]\n'
            'buckets = { batch = [1, 2, 8] }\nconstraints = ["batch % 4 == 0"]',
            """\
            m.toml: functions.f.constraints[0]: "mod(batch,4) == 0" is not true for batch = 1; batch = 2
              change the sizes in buckets, or the constraint
            m.toml: functions.f.kwargs.x: "batch-4" is -3 for batch = 1
              a dimension is 0 or more""",
            id="buckets that break constraints",
        ),
        pytest.param(
            '[functions.f]\nentry = "a:b"\nargs = ["f32[3]"]\ndonate_argnums = [0, 1]\n'
            'targets = ["cpu"]\nplatforms = ["tpu"]',
            """\
            m.toml: functions.f.targets[0]: the platform of target "cpu" is cpu, which is not in platforms
              add "cpu" to platforms
            m.toml: functions.f.donate_argnums[1]: there is no argument 1: the number of args is 1
              count from 0""",
            id="platforms and donated arguments",
        ),
        pytest.param(
            '[functions.f]\nentry = "a:b"\nargs = [["i64[3]"]]\nplatforms = ["cpu"]',
            """\
            m.toml: functions.f.args[0][0]: JAX turns i64 into i32 as long as enable_x64 is false
              write i32, or enable_x64 = true""",
            id="64 bits",
        ),
        pytest.param(
            '[functions.F]\nentry = "a:b"\nargs = []\nplatforms = ["cpu"]\n'
            '[functions.f]\nentry = "a:b"\nargs = []\nplatforms = ["cpu"]\n'
            '[functions.aot]\nentry = "a:b"\nargs = []\nplatforms = ["cpu"]\n'
            '[functions.explain]\nentry = "a:b"\nargs = []\nplatforms = ["cpu"]\n'
            '[targets.exported]\nplatform = "cpu"\nisa = "AVX"\n'
            '[targets.profile]\nplatform = "cpu"\nisa = "AVX"\n',
            """\
            m.toml: functions.f: "f" and "F" differ only in case, and so do their files
              give one of them another name
            m.toml: functions.aot: "aot" is the ending of files that stagec writes
              give the function another name
            m.toml: functions.explain: aot_manifest declares another target "m.explain"
              give the function another name
            m.toml: targets.exported: "exported" is the ending of files that stagec writes
              give the target another name
            m.toml: targets.profile: "profile" is the ending of files that stagec writes
              give the target another name""",
            id="names",
        ),
        pytest.param(
            '[functions.f]\nentry = "a:b"\nargs = []\nplatforms = ["cpu"]\nstatic = { n = 1 }\n'
            "[functions.f.variants.a]\nstatic = { m = 1 }\n[functions.f.variants.b]\nstatic = { m = 1 }\n"
            "[functions.f.variants.c]\nstatic = { n = 2, k = [1] }\n"
            '[functions.f-B]\nentry = "a:b"\nargs = []\nplatforms = ["cpu"]\n',
            """\
            m.toml: functions.f.variants.a.static: no value for "k", which other variants have
              write k = VALUE
            m.toml: functions.f.variants.b.static: no value for "k", which other variants have
              write k = VALUE
            m.toml: functions.f.variants.b.static: the same values as in variant "a"
              keep one of the two variants
            m.toml: functions.f.variants.c.static: no value for "m", which other variants have
              write m = VALUE
            m.toml: functions.f.variants.c.static.n: "n" is also in static of the function
              keep one of the two
            m.toml: functions.f.variants.b: its artifacts would be called "f-b", like those of functions.f-B
              give one of them another name""",
            id="variants",
        ),
        pytest.param(
            '[functions.f]\nentry = "a:b"\nargs = ["u8[n]", "f32[m,n]"]\nkwargs = { mask = "f32[n]" }\n'
            'platforms = ["cpu"]\n'
            "buckets = { n = [8], m = [2] }\n[functions.f.padding]\nk = {}\n"
            'n = { fill = -1, mask = "mask" }\nm = { mask = "vlaid" }',
            """\
            m.toml: functions.f.padding.k: buckets have no dimension "k"
              write one of m, n
            m.toml: functions.f.padding.n.mask: "mask" is f32[n], which is not a size
              write "bool[n]" or "i32[]"
            m.toml: functions.f.padding.n.fill: args[0] is u8[n], which cannot hold -1
              write a number that it can, such as 0
            m.toml: functions.f.padding.m.mask: no keyword argument "vlaid"
              write kwargs.vlaid = "bool[m]" or "i32[]\"""",
            id="padding",
        ),
        pytest.param(
            '[functions.f]\nentry = "a:b"\nargs = ["f32[3]", "f32[3]"]\nplatforms = ["cpu"]\n'
            'serve.inputs = { x = "a", y = "a" }\nserve.outputs = { result = "a" }\n'
            "serve.state.cache = { idle = 2 }",
            """\
            m.toml: functions.f.serve.inputs.y: "a" is the name of x
              write another name
            m.toml: functions.f.serve.state.cache: it has no argument and no result
              write for example cache = { argument = "cache", result = "result[1]" }""",
            id="names of a server",
        ),
        pytest.param(
            '[functions.f]\nentry = "a:b"\navals = "a:avals"\ntargets = ["cpu"]\n'
            'serve.inputs = { x = "a", y = "a" }\nserve.outputs = { "result[0]" = "b", "result[1]" = "b" }\n'
            "serve.state.cache = { idle = 2 }\n"
            "buckets = { n = [8] }\npadding.k = {}\npadding.n = { mask = 'valid' }\n"
            'constraints = ["n >= 8", "n <= 4"]\n'
            '[functions.g]\nentry = "a:b"\navals = "a:avals"\ntargets = ["cpu"]\n'
            'buckets = { n = [8], m = [2] }\nconstraints = ["n % 4 == 0", "n >= m"]',
            """\
            m.toml: functions.f.serve.inputs.y: "a" is the name of x
              write another name
            m.toml: functions.f.serve.outputs."result[1]": "b" is the name of result[0]
              write another name
            m.toml: functions.f.serve.state.cache: it has no argument and no result
              write for example cache = { argument = "cache", result = "result[1]" }
            m.toml: functions.f.constraints[1]: no sizes fulfil "n <= 4" and the constraints before it
              change it, or leave it out
            m.toml: functions.f.padding.k: buckets have no dimension "k"
              write one of n
            m.toml: functions.g.constraints: a:avals makes the symbolic dimensions, with their constraints
              write there for example symbolic_shape("m, n", constraints=["mod(n,4) == 0", "n >= m"])""",
            id="arguments that Python makes",
        ),
        pytest.param(
            '[functions.f]\nentry = "a:b"\nargs = ["f32[3]"]\nplatforms = ["cpu"]\nout_shardings = "P()"',
            """\
            m.toml: functions.f.out_shardings: there is no mesh to split over
              write mesh = "NAME" and a table [meshes.NAME]""",
            id="no mesh",
        ),
        pytest.param(
            '[functions.f]\nentry = "a:b"\nargs = ["f32[3]"]\nkwargs = { x = "f32" }\nplatforms = ["cpu"]\n'
            'mesh = "dp"\nin_shardings = ["P(dat)"]\nout_shardings = [{ a = "P(z)" }]\n'
            "[meshes.dp]\naxes = { data = 2, model = 3 }",
            """\
            m.toml: functions.f.in_shardings[0]: "P(dat)": the mesh has no axis "dat"
              did you mean "data"?
            m.toml: functions.f.out_shardings[0].a: "P(z)": the mesh has no axis "z"
              write one of data, model
            m.toml: functions.f.in_shardings: JAX takes in_shardings for positional arguments only, and there are kwargs
              move the kwargs into args""",
            id="axes",
        ),
        pytest.param(
            '[functions.f]\nentry = "a:b"\nargs = ["f32[3]"]\nplatforms = ["cpu"]\nmesh = "dp"\nfrontend = "arrays"\n'
            '[functions.g]\nentry = "a:b"\nargs = ["f32[3]"]\nplatforms = ["cpu"]\nmesh = "dp"\nvjp_order = 1\n'
            '[meshes.dp]\naxes = { data = 2, model = 3 }\naxis_types = ["Auto", "Explicit", "Auto"]',
            """\
            m.toml: functions.f.mesh: dp has Explicit axes, which JAX alone has, and stagec itself traces the function
              name a mesh without axis_types
            m.toml: functions.g.vjp_order: dp has Explicit axes, and JAX calls no derivative of an artifact over them
              leave it out, and list the derivative as a function of its own
            m.toml: meshes.dp.axis_types: the number of types is 3, and that of axes 2
              write a type for each of data, model""",
            id="types of axes",
        ),
        pytest.param(
            '[functions.f]\nentry = "a:b"\nplatforms = ["cpu"]\nmesh = "dp"\n'
            'args = [{ w = "f32[5,6]", b = ["f32[6]"] }, "f32[n,12]", "f32", "safetensors:w.safetensors"]\n'
            'in_shardings = [{ w = "P(data, model)", c = "P()" }, "P(data, (model, data2))", "P(None)", { k = "P()" }]'
            "\n"
            "[meshes.dp]\naxes = { data = 2, model = 3, data2 = 4 }",
            """\
            m.toml: functions.f.in_shardings[0]: no sharding for "b" of args[0]
              write a spec for it, such as "P()"
            m.toml: functions.f.in_shardings[0].w: args[0].w is f32[5,6]: 5 is not divisible by data = 2
              split another dimension, or change the mesh
            m.toml: functions.f.in_shardings[0].c: args[0] has no "c"
              write one of b, w
            m.toml: functions.f.in_shardings[2]: 1 entries for args[2], which is f32[] and has 0 dimensions
              leave out the entries that are too many""",
            id="specs that do not fit",
        ),
        pytest.param(
            '[functions.f]\nentry = "a:b"\nplatforms = ["cpu"]\nmesh = "dp"\n'
            'args = [["f32[6]", "f32[6]"], { x = "f32[6]" }]\nin_shardings = [["P()"], ["P(data)"]]\n'
            '[functions.g]\nentry = "a:b"\nplatforms = ["cpu"]\nmesh = "dp"\n'
            'args = ["f32[5]", "f32[6]"]\nin_shardings = "P(data)"\n'
            '[functions.h]\nentry = "a:b"\nplatforms = ["cpu"]\nmesh = "dp"\n'
            'args = ["f32[5]", "f32[6]"]\nin_shardings = ["unspecified"]\n'
            "[meshes.dp]\naxes = { data = 2 }",
            """\
            m.toml: functions.f.in_shardings[0]: 1 shardings for args[0], which has 2 elements
              write one for each
            m.toml: functions.f.in_shardings[1]: args[1] is a table
              write the same kind of tree, or one spec such as "P()"
            m.toml: functions.g.in_shardings: args[0] is f32[5]: 5 is not divisible by data = 2
              split another dimension, or change the mesh
            m.toml: functions.h.in_shardings: 1 shardings for args, which has 2 elements
              write one for each""",
            id="trees that differ",
        ),
        pytest.param(
            '[functions.f]\nentry = "a.mlir"\ntargets = ["cpu"]\nbuckets = { n = [1] }',
            """\
            m.toml: functions.f.buckets.n: no aval has a dimension "n"
              leave it out""",
            id="buckets of a StableHLO module",
        ),
    ],
)
def test_mistakes_across_a_function(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(StagecError) as caught:
        plan_of(HEAD + text, tmp_path)
    assert str(caught.value) == dedent(message)


@pytest.mark.parametrize("arguments", ['args = ["f32[n]"]', 'avals = "a:avals"'])
def test_every_check_runs_for_both_forms_of_arguments(arguments: str, tmp_path: Path) -> None:
    """Whether the manifest writes the arguments or a function of the model makes them."""
    text = f"""
        [meshes.m]
        axes = {{ data = 2 }}
        axis_types = ["Explicit"]
        [functions.f]
        entry = "a:b"
        {arguments}
        platforms = ["cpu"]
        targets = ["h200"]
        plugins = ["cuda"]
        limits.cpu = {{ flops = 1 }}
        mesh = "m"
        out_shardings = "P(rows)"
        vjp_order = 1
        variants.one.static = {{ n = 1 }}
        variants.two.static = {{ n = 1 }}
        bind."args[0]" = {{ file = "w.safetensors" }}
        donate_argnums = [0]
        golden.inputs = "in.npz"
        golden.seed = 1
        serve.state.cache = {{}}
        constraints = ["n >= 8", "n <= 4"]
        buckets.n = [8]
        padding.k = {{}}
        """
    with pytest.raises(StagecError) as caught:
        plan_of(HEAD + dedent(text), tmp_path)
    keys = [
        "targets[0]",
        "plugins[0]",
        "limits.cpu",
        "variants.two.static",
        'bind."args[0]"',
        "golden.seed",
        "vjp_order",
        "out_shardings",
        "mesh",
        "serve.state.cache",
        "constraints[1]",
        "padding.k",
    ]
    assert [problem.key for problem in caught.value.problems] == [f"functions.f.{key}" for key in keys]


def test_only_a_portable_artifact_needs_no_buckets(tmp_path: Path) -> None:
    planned = plan_of(HEAD + '[functions.f]\nentry = "a:b"\nargs = ["f32[n]"]\nplatforms = ["rocm"]', tmp_path)
    assert [export.name for export in planned.exports] == ["m.f"]
    assert planned.executables == ()


def test_variants_have_artifacts_of_their_own(tmp_path: Path) -> None:
    planned = plan_of(
        HEAD + '[functions.f]\nentry = "a:b"\nargs = ["f32[n]"]\ntargets = ["cpu"]\nbuckets = { n = [1, 2] }\n'
        "static = { shared = [1, [2]] }\n"
        "[functions.f.variants.two]\nstatic = { power = 2 }\n[functions.f.variants.half]\nstatic = { power = 0.5 }\n",
        tmp_path,
    )
    assert [(export.name, export.spec.static) for export in planned.exports] == [
        ("m.f-half", {"shared": (1, (2,)), "power": 0.5}),
        ("m.f-two", {"shared": (1, (2,)), "power": 2}),
    ]
    assert [executable.name for executable in planned.executables] == [
        *("m.f-half.cpu.n1", "m.f-half.cpu.n2", "m.f-two.cpu.n1", "m.f-two.cpu.n2")
    ]
    first = planned.executables[0]
    assert (first.export, first.spec.function, first.spec.variant) == ("m.f-half", "f", "half")
    assert first.spec.key == planned.exports[0].spec.key == "functions.f.variants.half"


def test_what_a_slice_holds_of_padding(tmp_path: Path) -> None:
    text = (
        '[functions.f]\nentry = "a:b"\nargs = ["f32[n]"]\nkwargs = { size = "i32[]" }\nplatforms = ["cpu"]\n'
        'buckets = { n = [8] }\npadding = { n = { fill = 2, mask = "size" } }\n'
    )
    (export,) = plan_of(HEAD + text, tmp_path).exports
    assert export.spec.padding == {"n": {"fill": 2, "mask": "size"}}


def test_what_a_slice_holds_of_meshes_and_checks(tmp_path: Path) -> None:
    planned = plan_of(
        HEAD + '[functions.f]\nentry = "a:b"\nargs = ["f32[8,n]"]\nplatforms = ["cpu"]\nmesh = "dp"\n'
        "in_shardings = [\"P( ('model','data') , None)\"]\nout_shardings = { y = \"unspecified\" }\n"
        'disabled_checks = ["platform"]\nallow_custom_calls = ["c", "a", "b"]\n'
        'matmul_precision = "highest"\n[meshes.dp]\naxes = { model = 2, data = 4 }',
        tmp_path,
    )
    spec = json.loads(to_json(planned.exports[0].spec))
    assert spec["mesh"] == [["model", 2], ["data", 4]]
    assert spec["in_shardings"] == ["P((model, data), None)"]
    assert spec["out_shardings"] == {"y": "unspecified"}
    assert spec["disabled_checks"] == ["platform"]
    assert spec["allow_custom_calls"] == ["a", "b", "c"]
    assert spec["matmul_precision"] == "highest"


ACCELERATORS = """
[targets.pod]
platform = "tpu"
topology = "V6 lite:4x2"
slices = 2
[targets.box]
platform = "cuda"
device = "h200"
topology = "1x1x8"
[targets.h100-sxm]
platform = "cuda"
device = "h200"
[functions.f]
entry = "a:b"
args = ["f32[n]"]
targets = ["pod", "box", "h100-sxm", "l4", "cpu-avx2", "v5e:2x2", "v5p=2x2"]
buckets = { n = [4] }
"""


def test_targets_by_table_by_short_name_and_by_topology(tmp_path: Path) -> None:
    planned = plan_of(HEAD + ACCELERATORS, tmp_path)
    assert describe(planned) == dedent(
        """\
        portable    m.f               cpu, cuda, tpu
        executable  m.f.box.n4        cuda h200, 1x1x8, n = 4
        executable  m.f.cpu-avx2.n4   cpu AVX2, parallelism 8, n = 4
        executable  m.f.h100-sxm.n4   cuda h200, n = 4
        executable  m.f.l4.n4         cuda l4, n = 4
        executable  m.f.pod.n4        tpu v6e:4x2, 2 slices, n = 4
        executable  m.f.v5e-2x2.n4    tpu v5e:2x2, n = 4
        executable  m.f.v5p-2x2x1.n4  tpu v5p:2x2x1, n = 4
        bundle      m                 version 1
        """
    )
    for executable in planned.executables:
        assert executable_spec(to_json(executable.spec)) == executable.spec
        assert executable.name == f"m.f.{executable.spec.target.name}.n4"


def test_a_slice_holds_its_device_in_full_and_no_other(tmp_path: Path) -> None:
    """So an edit of another device changes nothing."""
    planned = plan_of(HEAD + ACCELERATORS, tmp_path)
    texts = {executable.spec.target.name: to_json(executable.spec) for executable in planned.executables}
    assert json.loads(texts["l4"])["target"]["figures"] == dataclasses.asdict(gpus.device("l4"))
    assert "NVIDIA H200" not in texts["l4"]
    assert json.loads(texts["v5e-2x2"])["target"]["figures"] == dataclasses.asdict(tpus.generations()["v5e"])
    assert "figures" not in json.loads(texts["cpu-avx2"])["target"]


MESH = """
[targets.box]
platform = "cuda"
device = "h200"
topology = "1x1x4"
[meshes.grid]
axes = { data = 4, model = 2 }
[functions.f]
entry = "a:b"
args = ["f32[8]"]
mesh = "grid"
"""


SLICES = """
[targets.two]
platform = "tpu"
topology = "v6e:2x2"
slices = 2
[meshes.grid]
axes = { AXES }
[functions.f]
entry = "a:b"
args = ["f32[8]"]
mesh = "grid"
targets = ["two"]
"""


def test_a_mesh_whose_first_axis_does_not_go_over_slices(tmp_path: Path) -> None:
    with pytest.raises(StagecError) as caught:
        plan_of(HEAD + SLICES.replace("AXES", "model = 1, data = 8"), tmp_path)
    assert str(caught.value) == dedent(
        """\
        m.toml: functions.f.mesh: mesh "grid" begins with model = 1, and target "two" has 2 slices
          write the axis that goes over slices first in meshes.grid.axes, with a multiple of 2"""
    )
    plan_of(HEAD + SLICES.replace("AXES", "data = 2, model = 4"), tmp_path)
    plan_of(HEAD + SLICES.replace("AXES", "data = 1"), tmp_path)


def test_a_mesh_that_has_other_devices_than_a_target(tmp_path: Path) -> None:
    with pytest.raises(StagecError) as caught:
        plan_of(HEAD + MESH + 'targets = ["cpu", "v5e:2x4", "box", "h200", "v5e:4x4", "tpu7x:2x2x2"]', tmp_path)
    assert str(caught.value) == dedent(
        """\
        m.toml: functions.f.mesh: mesh "grid" (data = 4, model = 2) has 8 devices, and target "box" has 4
          write a mesh of 4, or a target of 8: topology = "1x1x8"
        m.toml: functions.f.mesh: mesh "grid" (data = 4, model = 2) has 8 devices, and target "h200" has 1
          write a mesh of 1, or a target of 8: topology = "1x1x8"
        m.toml: functions.f.mesh: mesh "grid" (data = 4, model = 2) has 8 devices, and target "v5e-4x4" has 16
          write a mesh of 16, or a target of 8: topology = "v5e:2x4"
        m.toml: functions.f.mesh: mesh "grid" (data = 4, model = 2) has 8 devices, and target "tpu7x-2x2x2" has 16
          write a mesh of 16, or a target of 8: topology = "tpu7x:2x2x1\""""
    )


def test_one_device_of_many_is_no_mistake(tmp_path: Path) -> None:
    text = MESH.replace("data = 4, model = 2", "data = 1").replace('mesh = "grid"\n', "")
    targets = 'targets = ["cpu", "v5e:2x4", "box"]'
    assert len(plan_of(HEAD + text + targets, tmp_path).executables) == 3
    assert len(plan_of(HEAD + text + f'mesh = "grid"\n{targets}', tmp_path).executables) == 3


def test_targets_that_would_have_one_name(tmp_path: Path) -> None:
    table = '[targets.v5e-2x2]\nplatform = "cpu"\nisa = "AVX"\n[targets.H200]\nplatform = "cpu"\nisa = "AVX"\n'
    function = '[functions.f]\nentry = "a:b"\nargs = []\ntargets = ["v5e-2x2", "h200", "v5e:2x2", "v6e:2x2"]\n'
    other = function.replace("functions.f", "functions.g").replace('"v6e:2x2"', '"v6e=2x2"')
    with pytest.raises(StagecError) as caught:
        plan_of(HEAD + table + function + other, tmp_path)
    assert str(caught.value) == dedent(
        """\
        m.toml: targets.h200: "h200" and "H200" differ only in case, and so do their files
          give one of them another name
        m.toml: functions.f.targets[2]: artifacts for "v5e:2x2" would be called "v5e-2x2", like those for "v5e-2x2"
          keep one of the two
        m.toml: functions.g.targets[3]: artifacts for "v6e=2x2" would be called "v6e-2x2", like those for "v6e:2x2"
          keep one of the two"""
    )


def test_weights_in_a_file_are_not_read(tmp_path: Path) -> None:
    text = '[functions.f]\nentry = "a:b"\nargs = ["safetensors:none.safetensors", "f32[n]"]\n'
    planned = plan_of(HEAD + text + 'targets = ["cpu"]\nbuckets = { n = [2] }', tmp_path)
    assert planned.exports[0].spec.args == ("safetensors:none.safetensors", "f32[n]")


def test_golden(tmp_path: Path) -> None:
    function = '[functions.f]\nentry = "a:b"\nargs = ["f32[n,m]"]\ntargets = ["cpu"]\n'
    function += "buckets = { n = [2, 8], m = [3] }\n"
    given = '[functions.f.golden]\ninputs = "data/golden.npz"\nbucket = { n = 8, m = 3 }\natol = 1e-6\n'
    planned = plan_of(HEAD + function + given, tmp_path).exports[0].spec.golden
    assert planned == {
        "seed": 0,
        "optimized": False,
        "inputs": "data/golden.npz",
        "bucket": {"m": 3, "n": 8},
        "rtol": None,
        "atol": 1e-6,
        "outputs": {},
    }
    device = function.replace('"cpu"', '"cpu", "h200"') + "golden = { optimized = true }"
    assert plan_of(HEAD + device, tmp_path).exports[0].spec.golden["optimized"] is True
    planned = plan_of(HEAD + function + "golden = {}", tmp_path).exports[0].spec.golden
    assert planned == {
        **dict.fromkeys(("rtol", "atol")),
        "seed": 0,
        "inputs": "",
        "optimized": False,
        "bucket": {"m": 3, "n": 2},
        "outputs": {},
    }


def test_what_is_wrong_with_golden(tmp_path: Path) -> None:
    text = """
    [functions.f]
    entry = "a:b"
    args = ["f32[n]"]
    targets = ["cpu"]
    buckets = { n = [2, 8] }
    golden = { seed = 1, inputs = "golden.npz", bucket = { n = 3 }, optimized = true }
    [functions.g]
    entry = "a:b"
    args = []
    targets = ["v5e:2x2"]
    golden = { bucket = { n = 3 } }
    [functions.h]
    entry = "a:b"
    args = []
    platforms = ["cpu"]
    golden = {}
    """
    with pytest.raises(StagecError) as caught:
        plan_of(HEAD + text, tmp_path)
    assert str(caught.value) == dedent(
        """\
        m.toml: functions.f.golden.optimized: none of its targets is a device, whose compiler decides something
          add a target, such as h200 or v5e:2x2, or leave it out
        m.toml: functions.f.golden.seed: golden.npz has the inputs, and none are generated
          leave out seed, or inputs
        m.toml: functions.f.golden.bucket: n = 3 is not a bucket of the function
          write for example bucket = { n = 8 }
        m.toml: functions.g.golden.bucket: n = 3 is not a bucket of the function
          leave it out: it has none
        m.toml: functions.h.golden: there is no executable to check
          add a target, such as cpu-avx2"""
    )


def heavy_modules_after(code: str, folder: Path) -> set[str]:
    """The array libraries that a fresh interpreter has imported after some code."""
    script = f"{code}\nimport sys\nprint('HEAVY', *sorted({{'jax', 'jaxlib', 'numpy'}} & sys.modules.keys()))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(COMPILER), *filter(None, sys.path)])}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment, cwd=folder
    )
    return set(result.stdout.splitlines()[-1].split()[1:])


def test_planning_is_light(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(MANIFEST)
    for arguments in (["action", "plan", "m.toml"], ["action", "plan", "m.toml", "--json"], ["schema"]):
        code = f"from stagec.cli import main\nassert main({arguments}) == 0"
        assert heavy_modules_after(code, tmp_path) == set()


def test_the_test_of_lightness_can_fail(tmp_path: Path) -> None:
    assert heavy_modules_after("import numpy", tmp_path) == {"numpy"}


def test_a_function_says_how_it_is_traced_or_the_manifest_does(tmp_path: Path) -> None:
    text = """
[manifest]
name = "m"
version = "1"
enable_x64 = true
matmul_precision = "highest"
prng_impl = "rbg"
environment = { B = "1", A = "1" }
host_callbacks = "drop"
[functions.own]
entry = "pkg.mod:f"
args = ["f32[3]"]
platforms = ["cpu"]
enable_x64 = false
matmul_precision = "default"
prng_impl = "threefry2x32"
environment = { C = "2", B = "2" }
host_callbacks = "refuse"
[functions.theirs]
entry = "pkg.mod:f"
args = ["f64[3]"]
platforms = ["cpu"]
[functions.file]
entry = "f.mlir"
platforms = ["cpu"]
"""
    keys = ("enable_x64", "matmul_precision", "prng_impl", "environment", "host_callbacks")
    found = {
        export.spec.name: tuple(getattr(export.spec, key) for key in keys) for export in plan_of(text, tmp_path).exports
    }
    assert found == {
        "own": (False, "default", "threefry2x32", {"A": "1", "B": "2", "C": "2"}, "refuse"),
        "theirs": (True, "highest", "rbg", {"A": "1", "B": "1"}, "drop"),
        "file": (False, None, None, {}, "refuse"),
    }


def test_what_nobody_examined(tmp_path: Path) -> None:
    """One word holds for all targets, and for what models compute."""
    none = MANIFEST.replace("[manifest]\n", '[manifest]\nexamined = "none"\n')
    planned, usual = plan_of(none, tmp_path), plan_of(MANIFEST, tmp_path)
    assert {row.spec.target.examined for row in planned.executables} == {"none"}
    assert {row.spec.computed_on["examined"] for row in planned.exports} == {"none"}
    assert {row.spec.target.examined for row in usual.executables} == {"here"}
    assert not any("examined" in row.spec.computed_on for row in usual.exports)
    project = plan_of(none.replace('"none"', '"project"'), tmp_path)
    assert {row.spec.target.examined for row in project.executables} == {"project"}
    assert {row.spec.computed_on["examined"] for row in project.exports} == {"project"}
    with pytest.raises(StagecError) as caught:
        plan_of(CACHED.replace("jax_cache = true", 'examined = "none"').replace("cpu-avx2", "armv8-a"), tmp_path)
    assert str(caught.value).splitlines()[:2] == [
        'm.toml: functions.f.targets[0]: armv8-a is for aarch64, and examined = "none" is for x86-64 and accelerators',
        "  take examined out of [manifest], or name the target in another manifest",
    ]
    with pytest.raises(StagecError) as caught:
        plan_of(MANIFEST.replace("[manifest]\n", '[manifest]\nexamined = "nobody"\n'), tmp_path)
    assert str(caught.value).startswith("m.toml: manifest.examined: ")
    assert '"project"' in str(caught.value)
    assert '"none"' in str(caught.value)


CACHED = """
[manifest]
name = "m"
version = "1"
jax_cache = true
jax_cache_machines = { cpu-avx2 = ["0123456789abcdef"] }
[functions.f]
entry = "pkg.mod:f"
args = ["f32[n]"]
targets = ["cpu-avx2", "cpu-sse42"]
buckets = { n = [1, 2] }
jax_cache_committed = [[], [0]]
[functions.g]
entry = "pkg.mod:g"
args = ["f32[3]"]
targets = ["cpu-avx2"]
jax_cache = false
[functions.file]
entry = "f.mlir"
targets = ["cpu-avx2"]
[functions.arrays]
entry = "pkg.mod:h"
frontend = "arrays"
args = ["f32[3]"]
targets = ["cpu-avx2"]
"""


def test_the_compilation_cache_of_jax(tmp_path: Path) -> None:
    """It has what JAX traces of the functions for which it is asked."""
    planned = plan_of(CACHED, tmp_path)
    names = [f"m.f.{target}.n{size}" for target in ("cpu-avx2", "cpu-sse42") for size in (1, 2)]
    assert json.loads(planned.to_json())["jax_cache"] == {
        "executables": {name: [[], [0]] for name in names},
        "machines": {"cpu-avx2": ["0123456789abcdef"]},
    }
    assert "jax cache   m.jax_cache        4 executables\n" in describe(planned)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'entry = "f.mlir"\n',
            'entry = "f.mlir"\njax_cache = true\n',
            "m.toml: functions.file.jax_cache: JAX does not trace this function, so no program has it in JAX's "
            "compilation cache\n  leave it out",
        ),
        (
            'targets = ["cpu-avx2"]\njax_cache = false\n',
            'jax_cache = true\nplatforms = ["cpu"]\n',
            "m.toml: functions.g.jax_cache: the compilation cache has executables, and this function has no targets\n"
            '  write for example targets = ["cpu-avx2"]',
        ),
        (
            "{ cpu-avx2 = ",
            "{ cpu-avx = ",
            'm.toml: manifest.jax_cache_machines.cpu-avx: no function with jax_cache has the target "cpu-avx"\n'
            '  did you mean "cpu-avx2"?',
        ),
        (
            "[[], [0]]",
            "[[], [1]]",
            "m.toml: functions.f.jax_cache_committed[1]: there is no argument 1: the number of args is 1\n"
            "  count from 0",
        ),
        (
            'targets = ["cpu-avx2"]\njax_cache = false\n',
            'targets = ["cpu-avx2", "armv8-a"]\n',
            "m.toml: functions.g.jax_cache: armv8-a is for aarch64, and stagec knows the keys of JAX's compilation "
            "cache for x86-64 alone\n"
            "  write jax_cache = false for this function, or name the target in another manifest",
        ),
        (
            "jax_cache = true\njax_cache_machines",
            'jax_cache = true\nexamined = "none"\njax_cache_machines',
            'm.toml: functions.f.jax_cache: with examined = "none" what is built follows the machine that builds, '
            "which no key of JAX's has\n"
            "  write jax_cache = false, or take examined out of [manifest]",
        ),
    ],
    ids=["file", "targets", "machines", "argument", "architecture", "examined"],
)
def test_a_cache_that_cannot_be(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(StagecError) as caught:
        plan_of(CACHED.replace(old, new), tmp_path)
    assert str(caught.value) == message
