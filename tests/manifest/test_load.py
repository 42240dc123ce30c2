"""Loading a manifest: what is accepted, where and why it is refused; `messages.txt` has the exact words of many.

Modules: `core/builds/frontends.py`, `manifest/cpu.py`, `manifest/environment.py`, `manifest/gpu.py`,
`manifest/models.py`, `manifest/tables.py`, `manifest/targets.py`,
`manifest/toml.py`, `manifest/tpu.py`, `manifest/values.py`.
"""

import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import get_args

import pytest
from hypothesis import given, strategies as st

from stagec.core.builds.specs import GpuTarget as GpuSpec
from stagec.core.messages.errors import StagecError, nearest, show
from stagec.manifest import load_manifest, target_files
from stagec.manifest.load import _PATTERNS, REFUSED
from stagec.manifest.models import (
    CpuTarget,
    CudaTarget,
    Document,
    Function,
    Header,
    Limits,
    Mesh,
    Precision,
    RocmTarget,
    TpuTarget,
    Variant,
)
from tests.messages import Messages

MESSAGES = Messages(Path(__file__).with_name("messages.txt"))
MODELS = (Document, Header, CpuTarget, CudaTarget, RocmTarget, TpuTarget, Mesh, Function, Variant, Limits)

HEAD = """
[manifest]
name = "m"
version = "1"
[targets.cpu]
platform = "cpu"
isa = "AVX2"
"""
FUNCTION = """
[functions.f]
entry = "pkg.mod:f"
args = ["f32[3]"]
targets = ["cpu"]
"""


def refusal_of(text: str, folder: Path) -> StagecError:
    """What is raised for a manifest, under the name m.toml."""
    path = folder / "manifest.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(StagecError) as caught:
        load_manifest(path, "m.toml")
    return caught.value


def problems_of(text: str, folder: Path) -> str:
    """The message of the problems in a manifest, under the name m.toml."""
    return str(refusal_of(text, folder))


def test_releases_of_jaxlib(tmp_path: Path) -> None:
    for written, message in {
        '"0.12.0"': 'm.toml: manifest.jaxlib: "0.12.0" is not an array',
        "[]": "m.toml: manifest.jaxlib: an empty array",
        '["newest"]': 'm.toml: manifest.jaxlib[0]: "newest" is not a release: numbers with . between them',
        '["0.12.0", "0.12.0"]': 'm.toml: manifest.jaxlib[1]: "0.12.0" is written twice',
    }.items():
        text = problems_of(HEAD.replace('version = "1"', f'version = "1"\njaxlib = {written}') + FUNCTION, tmp_path)
        assert text.partition("\n")[0] == message
    assert text == f"{message}\n  write it once"
    text = problems_of(HEAD.replace('"AVX2"', '"AVX2"\njaxlib = [1]') + FUNCTION, tmp_path)
    assert text == 'm.toml: targets.cpu.jaxlib[0]: 1 is not a string\n  write for example jaxlib = ["0.10.1", "0.10.2"]'


def test_releases_of_a_fleet(tmp_path: Path) -> None:
    wrong = HEAD.replace('version = "1"', 'version = "1"\nserves = ["0.12.0"]')
    assert problems_of(wrong + FUNCTION, tmp_path).partition("\n")[0] == (
        'm.toml: manifest.serves[0]: "0.12.0" is not a release of jaxlib, as jaxlib==0.12.0 is'
    )


def test_load(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text(
        HEAD
        + """
        [functions.f]
        entry = "pkg.mod:Class.method"
        args = [{ w = "f32[64, 10]", b = ["f32", "key<fry>[]"] }, [], "safetensors:w.safetensors?sep=."]
        kwargs = { mask = "bool[batch]" }
        targets = ["cpu"]
        buckets = { batch = [64, 1, 8] }
        constraints = ["batch % 1 == 0"]
        static = { temperature = 1, sizes = [1, [2.0, "x"]] }
        """
    )
    manifest = load_manifest(path, "shown/m.toml")
    function = manifest.functions["f"]
    assert manifest.file == "shown/m.toml"
    assert function.args == (
        {"w": "f32[64,10]", "b": ("f32[]", "key<fry>[]")},
        (),
        "safetensors:w.safetensors?sep=.",
    )
    assert function.kwargs == {"mask": "bool[batch]"}
    assert function.buckets == {"batch": (1, 8, 64)}
    assert function.constraints == ("mod(batch,1) == 0",)
    assert function.static == {"temperature": 1, "sizes": (1, (2.0, "x"))}
    assert manifest.targets["cpu"].parallelism == 8
    assert load_manifest(path).file == str(path)


@pytest.mark.parametrize(
    ("lines", "problems"),
    [
        pytest.param(
            'args = ["f32[3]", { w = "f32[batch,64" }]',
            ['functions.f.args[1].w -> "f32[batch,64]"'],
            id="aval",
        ),
        pytest.param(
            'args = [{ "a.b" = "float32[3]" }, 3]',
            ['functions.f.args[0]."a.b" -> f32', 'functions.f.args[1] -> "f32[batch,64]"'],
            id="several leaves",
        ),
        pytest.param(
            'args = ["i2[3]"]',
            ["functions.f.args[0] -> i4"],
            id="not exportable",
        ),
        pytest.param(
            'args = "f32[3]"',
            ['functions.f.args -> args = ["f32[batch,64]"]'],
            id="args not an array",
        ),
        pytest.param(
            'args = ["safetensors:/a.safetensors", "safetensors:a.safetensors?sep=", "safetensors:a.safetensors?order=1"]',
            [
                'functions.f.args[0] -> "safetensors:weights.safetensors"',
                'functions.f.args[1] -> "safetensors:weights.safetensors"',
                'functions.f.args[2] -> "safetensors:weights.safetensors"',
            ],
            id="safetensors",
        ),
        pytest.param(
            'args = []\nkwargs = { "a b" = "f32" }',
            ['functions.f.kwargs."a b" -> kwargs = { mask = "bool[batch]" }'],
            id="name of a keyword argument",
        ),
        pytest.param(
            'args = []\nentry = "pkg.mod"',
            ['functions.f.entry -> entry = "examples.digits.model:predict"'],
            id="entry",
        ),
        pytest.param(
            'args = []\nentry = "./pkg/mod.py:f"',
            ['functions.f.entry -> entry = "pkg.mod:f"'],
            id="entry by its file",
        ),
        pytest.param(
            "args = []\nentry = 3",
            ['functions.f.entry -> entry = "examples.digits.model:predict"'],
            id="entry not a string",
        ),
        pytest.param(
            "args = []\nentry = [" + ", ".join(["1234567"] * 10) + "]",
            ['functions.f.entry -> entry = "examples.digits.model:predict"'],
            id="a long value is cut",
        ),
        pytest.param(
            'args = []\navals = "pkg.mod:f"\nkwargs = {}',
            ["functions.f"],
            id="args and avals",
        ),
        pytest.param(
            "",
            ['functions.f -> args = ["f32[batch,64]'],
            id="no args",
        ),
        pytest.param(
            'args = []\nplatforms = ["cpu", "gpu"]',
            ["functions.f.platforms[1]"],
            id="platform",
        ),
        pytest.param(
            "args = []\nplatforms = []",
            ['functions.f.platforms -> platforms = ["cpu", "cuda", "tpu"]'],
            id="no platforms",
        ),
        pytest.param(
            'args = []\nplatforms = ["cpu", "tpu", "cpu"]\ndonate_argnums = [0, 0]',
            ["functions.f.platforms[2]", "functions.f.donate_argnums[1]"],
            id="twice",
        ),
        pytest.param(
            "args = []\nbuckets = { a = [1, 0, 1], b = [], c = 3, d = [1.0] }",
            [
                "functions.f.buckets.a[1]",
                "functions.f.buckets.a[2]",
                "functions.f.buckets.b",
                "functions.f.buckets.c -> buckets = { batch = [1, 8, 64] }",
                "functions.f.buckets.d[0] -> buckets = { batch = [1, 8, 64] }",
            ],
            id="buckets",
        ),
        pytest.param(
            'args = []\nconstraints = ["batch", "batch / 2 == 1"]',
            ['functions.f.constraints[0] -> "batch % 8 == 0"', 'functions.f.constraints[1] -> "batch % 8 == 0"'],
            id="constraints",
        ),
        pytest.param(
            "args = []\nstatic = { a = [1, { b = 1 }], c = inf, d = 2020-01-01 }",
            ["functions.f.static.a[1]", "functions.f.static.c", "functions.f.static.d -> 1.0"],
            id="static",
        ),
        pytest.param(
            'kwargs = { a = "f32" }\nstatic = { a = 1 }',
            ["functions.f.static.a"],
            id="static and kwargs",
        ),
        pytest.param(
            "args = []\nvjp_order = 3\nkeep_unused = 1\ndonate_argnums = [-1]",
            [
                "functions.f.donate_argnums[0] -> donate_argnums = [0]",
                "functions.f.keep_unused -> keep_unused = true",
                "functions.f.vjp_order",
            ],
            id="numbers",
        ),
        pytest.param(
            "args = []\ndonate_argnam = []",
            ['functions.f.donate_argnam -> "donate_argnames"'],
            id="unknown key",
        ),
        pytest.param(
            'args = []\nisa = "AVX"\nreproducible = true',
            ["functions.f.isa", "functions.f.reproducible"],
            id="key of another table",
        ),
        pytest.param(
            "args = []\nstatic_argnums = [0]",
            ["functions.f.static_argnums"],
            id="refused keys",
        ),
        pytest.param(
            """args = []
            bind = { p = "../w.safetensors", q = "w.npz" }
            [functions.f.golden]
            inputs = "./golden.npz"
            bucket = { n = "8" }
            input = 1""",
            [
                'functions.f.bind.p.file -> file = "weights.safetensors"',
                'functions.f.bind.q.file -> file = "weights.safetensors"',
                'functions.f.golden.inputs -> inputs = "golden.npz"',
                "functions.f.golden.bucket.n -> bucket = { batch = 8 }",
                'functions.f.golden.input -> "inputs"',
            ],
            id="weights and golden",
        ),
        pytest.param(
            "args = []\nserve = { inputs = { x = 'my image' }, outputs = { result = 'bïld' } }",
            [
                'functions.f.serve.inputs.x -> inputs = { "batch[\'image\']" = "image" }',
                'functions.f.serve.outputs.result -> outputs = { "result[\'probs\']" = "probs" }',
            ],
            id="names for a server",
        ),
        pytest.param(
            'args = []\ngolden = { inputs = "/data/golden.npy" }',
            ['functions.f.golden.inputs -> inputs = "golden.npz"'],
            id="golden inputs",
        ),
        pytest.param(
            """args = []
            [functions.f.variants."é"]
            static = { n = 1 }
            [functions.f.variants.empty]
            static = {}
            [functions.f.variants.none]
            [functions.f.variants.other]
            static = { n = [{}] }
            targets = ["cpu"]""",
            [
                'functions.f.variants."é"',
                "functions.f.variants.empty.static -> static = { power = 2 }",
                "functions.f.variants.none.static -> static = { power = 2 }",
                "functions.f.variants.other.static.n[0]",
                "functions.f.variants.other.targets",
            ],
            id="variants",
        ),
        pytest.param(
            'kwargs = { n = "f32" }\nvariants = { a = { static = { n = 1 } } }',
            ["functions.f.variants.a.static.n"],
            id="variant and kwargs",
        ),
        pytest.param(
            'args = []\ndisabled_checks = ["platfrom", "custom_call:mine", "shape_assertions", "platform"]',
            [
                'functions.f.disabled_checks[0] -> "platform"',
                'functions.f.disabled_checks[1] -> allow_custom_calls = ["mine"]',
                "functions.f.disabled_checks[2]",
            ],
            id="disabled checks",
        ),
        pytest.param(
            'args = []\nmesh = "a b"',
            ['functions.f.mesh -> mesh = "dp"', "functions.f.mesh"],
            id="mesh",
        ),
        pytest.param(
            'args = []\nin_shardings = ["P(x, x)", "Q(x)", "P(x, 1)", 3, ["P("]]\nout_shardings = { y = "P(a=1)" }',
            [
                "functions.f.in_shardings[0]",
                'functions.f.in_shardings[1] -> "P(data, None)"',
                'functions.f.in_shardings[2] -> "P(data, None)"',
                'functions.f.in_shardings[3] -> "P(data, None)"',
                'functions.f.in_shardings[4][0] -> "P(data, None)"',
                'functions.f.out_shardings.y -> "P(data, None)"',
            ],
            id="shardings",
        ),
        pytest.param(
            'entry = "sub/model.mlirbc"\nargs = []\nvjp_order = 1',
            ["functions.f.args", "functions.f.vjp_order"],
            id="StableHLO",
        ),
    ],
)
def test_a_function_with_a_mistake(
    request: pytest.FixtureRequest, lines: str, problems: list[str], tmp_path: Path
) -> None:
    function = '\n[functions.f]\ntargets = ["cpu"]\n' + ("" if "entry =" in lines else 'entry = "pkg.mod:f"\n')
    MESSAGES.check(request.node, refusal_of(HEAD + function + lines, tmp_path), problems)


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        pytest.param(
            "",
            ["manifest", "functions"],
            id="empty",
        ),
        pytest.param(
            HEAD + "[functions]\n",
            ["functions"],
            id="no functions",
        ),
        pytest.param(
            FUNCTION + '[manifest]\nname = "a.b"\nversion = "1/2"\n[targets.cpu]\n',
            [
                'manifest.name -> name = "digits"',
                'manifest.version -> version = "1.0.0"',
                'targets.cpu -> platform = "cpu"',
            ],
            id="header and target",
        ),
        pytest.param(
            HEAD
            + "parallelism = 0\ncompiler_options = { a = [1] }\n"
            + '[targets.a]\nplatform = "metal"\nisa = "native"\n'
            + '[targets.b]\nplatform = "cpu"\nisa = "native"\ntopology = "v5e:2x2"\ndevice = "h200"\n'
            + '[targets.c]\nplatform = "tpu"\nisa = "AVX"\ntopology = "v5e"\nchips_per_host = "2"\nslices = 0\n'
            + '[targets.d]\nplatform = "cuda"\ndevice = "a/b"\ntopology = "8 x 8"\n'
            + FUNCTION,
            [
                "targets.cpu.parallelism -> parallelism = 8",
                "targets.cpu.compiler_options.a -> 1.0",
                "targets.a",
                "targets.b.isa",
                "targets.b.topology",
                "targets.b.device",
                'targets.c.topology -> topology = "v5e:2x2"',
                "targets.c.slices -> slices = 2",
                "targets.c.isa",
                'targets.d.device -> device = "h100-sxm"',
                'targets.d.topology -> topology = "1x1x8"',
            ],
            id="targets",
        ),
        pytest.param(
            HEAD
            + '[targets.a]\nplatform = "cpu"\narchitecture = "aarch64"\n'
            + '[targets.b]\nplatform = "cpu"\narchitecture = "aarch64"\nisa = "AVX2"\ncore = "generic"\n'
            + '[targets.c]\nplatform = "cpu"\ncore = "neoverse-n1"\n'
            + '[targets.d]\nplatform = "cpu"\n'
            + FUNCTION,
            [
                'targets.a.core -> core = "neoverse-n1"',
                "targets.b.isa",
                "targets.c.core",
                'targets.c.isa -> isa = "AVX2"',
                'targets.d.isa -> isa = "AVX2"',
            ],
            id="architectures",
        ),
        pytest.param(
            HEAD + '[functions."a.b"]\nentry = "pkg.mod:f"\nargs = []\nplatforms = ["cpu"]\n',
            ['functions."a.b"'],
            id="name of a function",
        ),
        pytest.param(
            HEAD + '[functions.f]\nentry = "pkg.mod:f"\nargs = []\n',
            ['functions.f -> targets = ["NAME"]'],
            id="nothing to build",
        ),
        pytest.param(
            HEAD + FUNCTION.replace('["cpu"]', '["cpuu", "xyz"]'),
            ['functions.f.targets[0] -> "cpu"', "functions.f.targets[1]"],
            id="unknown target",
        ),
        pytest.param(
            HEAD.split("[targets", maxsplit=1)[0] + FUNCTION,
            ['functions.f.targets[0] -> "cpu-sse42"'],
            id="no targets",
        ),
        pytest.param(
            "function = 1\nfunctions = 2\n" + HEAD,
            ["functions", 'function -> "functions"'],
            id="not a table",
        ),
        pytest.param(
            HEAD.replace('version = "1"', 'version = "1"\njax_cache_machines = { cpu = ["85EFD4ACE077AAE1"] }')
            + FUNCTION,
            ['manifest.jax_cache_machines.cpu[0] -> jax_cache_machines = { cpu-avx2 = ["85efd4ace077aae1"] }'],
            id="machines in capitals",
        ),
    ],
)
def test_a_manifest_with_a_mistake(
    request: pytest.FixtureRequest, text: str, problems: list[str], tmp_path: Path
) -> None:
    MESSAGES.check(request.node, refusal_of(text, tmp_path), problems)


@pytest.mark.parametrize(
    ("text", "what", "write"),
    [
        ("[a.b]\n[a.c]\n[a.b]\n", "line 3: the table [a.b] is there twice", "join the two, or give one of them an"),
        ("[a]\nb = 1\nb = [\n]\n", "line 4: the key of this value is there twice", "keep one of the two"),
        ("[a]\nb = 1\nb = 2\n", "line 3: the key b is there twice", "keep one of the two"),
        ('a = "x\nb = 1\n', "line 1: the string has no quote at its end", "end it with the quote that it begins"),
        ('a = "x', "the last string has no quote at its end", "end it with the quote that it begins with"),
    ],
)
def test_what_is_wrong_with_the_syntax(text: str, what: str, write: str, tmp_path: Path) -> None:
    assert problems_of(text, tmp_path).startswith(f"m.toml: not TOML: {what}\n  {write}")


@pytest.mark.parametrize("text", ["[manifest\n", "a = [1 2]\n", "a = x\n"])
def test_a_manifest_that_is_not_toml(text: str, tmp_path: Path) -> None:
    with pytest.raises(tomllib.TOMLDecodeError) as error:
        tomllib.loads(text)
    assert problems_of(text, tmp_path) == f"m.toml: not TOML: {error.value}\n  see https://toml.io for the syntax"


def test_every_pattern_has_words() -> None:
    """Without them, the message of a string that does not match would be a KeyError."""

    def patterns(schema: object) -> Iterator[str]:
        if isinstance(schema, dict):
            yield from [schema["pattern"]] if isinstance(schema.get("pattern"), str) else []
        parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
        for part in parts:
            yield from patterns(part)

    schemas = [model.model_json_schema() for model in (Document, *MODELS)]
    assert {pattern for schema in schemas for pattern in patterns(schema)} <= set(_PATTERNS)


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_every_refused_key_says_what_to_write(key: str, tmp_path: Path) -> None:
    what, write = REFUSED[key]
    assert problems_of(f"{HEAD}{FUNCTION}{key} = 1", tmp_path) == f"m.toml: functions.f.{key}: {what}\n  {write}"
    assert not any(key in model.model_fields for model in (Document, Header, Mesh, Function, Variant, Limits))


def test_matmul_precision(tmp_path: Path) -> None:
    names = ", ".join(f'"{name}"' for name in get_args(Precision))
    message = f'm.toml: functions.f.matmul_precision: unknown value "best"\n  write one of {names}'
    assert problems_of(HEAD + FUNCTION + 'matmul_precision = "best"', tmp_path) == message


def test_padding(tmp_path: Path) -> None:
    text = HEAD + FUNCTION + 'padding = { n = { fill = "x", masks = "m" } }'
    assert problems_of(text, tmp_path) == (
        'm.toml: functions.f.padding.n.fill: "x" is not a number\n  write for example 0\n'
        'm.toml: functions.f.padding.n.masks: unknown key\n  did you mean "mask"?'
    )


def test_meshes(tmp_path: Path) -> None:
    tables = (
        '[meshes.dp]\naxes = {}\naxis_types = ["Manual"]\n[meshes.wrong]\naxes = { "a b" = 2, x = 0 }\nshape = [2]\n'
    )
    assert problems_of(HEAD + FUNCTION + 'mesh = "dpp"\n' + tables, tmp_path) == dedent(
        """\
        m.toml: meshes.dp.axes: an empty table
          write for example axes = { data = 2, model = 2 }
        m.toml: meshes.dp.axis_types[0]: unknown value "Manual"
          write one of "Auto", "Explicit"
        m.toml: meshes.wrong.axes."a b": "a b" is not a Python name
          write for example axes = { data = 2, model = 2 }
        m.toml: meshes.wrong.axes.x: 0 is less than 1
          write for example axes = { data = 2, model = 2 }
        m.toml: meshes.wrong.shape: unknown key
          write one of axes, axis_types
        m.toml: functions.f.mesh: unknown mesh "dpp"
          did you mean "dp"?"""
    )


NO_FILE = (
    "../a.safetensors", "/a.safetensors", "./a.safetensors", "a/../b.safetensors", "a//b.safetensors", ".a.safetensors",
    "-a.safetensors", "a b.safetensors", "a\nb.safetensors", "a\0.safetensors", "$(touch x).safetensors", "a`b`.safetensors",
    "a;b.safetensors", "a\\b.safetensors", "c:a.safetensors", "//c:a.safetensors", "a=b.safetensors", "é.safetensors",
    "\x1b[31m.safetensors", "a.safetensors\n", "a.safetensors/", "",
)  # fmt: skip
"""What would be something else as a Bazel label, a word of a command, or a path; whatever the ending."""


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        ("mlir", "[functions.f]\nentry = FILE\nplatforms = ['cpu']"),
        ("safetensors", "[functions.f]\nentry = 'a:b'\nargs = [FILE]\nplatforms = ['cpu']"),
        ("safetensors", "[functions.f]\nentry = 'a:b'\nargs = ['f32']\nplatforms = ['cpu']\nbind = { x = FILE }"),
        ("npz", FUNCTION + "golden = { inputs = FILE }"),
        ("toml", FUNCTION + "[targets.x]\nplatform = 'cuda'\ndevice = FILE"),
        ("textproto", FUNCTION + "[targets.x]\nplatform = 'cuda'\ndevice = 'h200'\nautotuning = FILE"),
    ],
)
def test_one_rule_for_every_file_that_a_manifest_names(tmp_path: Path, ending: str, text: str) -> None:
    for name in NO_FILE:
        path = name.replace("safetensors", ending)
        if (not path and ending == "textproto") or (path == "c:a.mlir"):
            continue  # there is none; a function of module c
        written = f"safetensors:{path}" if "args = [FILE]" in text else path
        told = problems_of(HEAD + text.replace("FILE", show(written)), tmp_path)
        assert f"not a path of a .{ending} file below the manifest's folder" in told, path
        assert told.isprintable() or told.count("\n") == len(told.splitlines()) - 1


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("x = " + "[" * 5000 + "]" * 5000, "nested deeper than 100 levels"),
        ("x = " + "[" * 150 + "]" * 150, "nested deeper than 100 levels"),
        ("x" + ".x" * 80_000 + " = 1", "nested deeper than 100 levels"),
        ("[" + ".".join(['"x"'] * 5000) + "]", "nested deeper than 100 levels"),
        ("x = { y" + " . y" * 200 + " = 1 }", "nested deeper than 100 levels"),
        ("x = " + "9" * 5000, "an integer has more than 64 bits"),
        ("x = [[{ y = -9223372036854775809 }]]", "an integer has more than 64 bits"),
        ("x = [" + "[]," * 250_000 + "]", "more than 200,000 tables and arrays"),
        ("\n".join(f"[x.y{at}" + ".z" * 90 + "]" for at in range(2500)), "more than 200,000 tables and arrays"),
        ('x = [\'"\', """\n"\\"" """, ' + "{ y.y.y = 1 }," * 80_000 + "]", "more than 200,000 tables and arrays"),
    ],
)
def test_toml_that_is_too_much(tmp_path: Path, text: str, what: str) -> None:
    started = time.process_time()
    assert problems_of(HEAD + FUNCTION + text, tmp_path) == f"m.toml: {what}"
    (tmp_path / "device.toml").write_text(text)
    target = '[targets.t]\nplatform = "cuda"\ndevice = "device.toml"\n'
    assert f"device.toml: not TOML: {what}" in problems_of(HEAD + target + FUNCTION, tmp_path)
    assert list(target_files(tmp_path / "device.toml")) == []
    assert time.process_time() - started < 2


def test_texts_are_no_tables(tmp_path: Path) -> None:
    text = 'text = """\n[[{.\\"""' + "{" * 300_000 + '"""  # ' + "[" * 300_000
    told = problems_of(HEAD + FUNCTION + text, tmp_path)
    assert told.startswith("m.toml: functions.f.text: unknown key")


def test_a_manifest_that_is_too_large(tmp_path: Path) -> None:
    told = problems_of("# " + "x" * (4 << 20), tmp_path)
    assert told.startswith("m.toml: cannot read the manifest: its 4,194,306 bytes are over the limit of 4,194,304")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StagecError) as caught:
        load_manifest(tmp_path / "none.toml", "none.toml")
    what = "cannot read the manifest: no such file or directory"
    assert str(caught.value) == f"none.toml: {what}\n  give the path of a TOML file"
    with pytest.raises(StagecError) as caught:
        load_manifest(tmp_path, "folder")
    assert str(caught.value) == "folder: cannot read the manifest: it is a folder\n  give the path of a TOML file"
    path = tmp_path / "latin1.toml"
    path.write_bytes(b"# caf\xe9\n")
    with pytest.raises(StagecError) as caught:
        load_manifest(path, "latin1.toml")
    assert str(caught.value) == "latin1.toml: byte 5 is not UTF-8 text\n  save the file as UTF-8"


def test_nearest() -> None:
    assert nearest("ARGS", ["args", "avals"]) == 'did you mean "args"?'
    assert nearest("zzz", ["b", "a"]) == "write one of a, b"
    assert nearest("zzz", []) == ""


DEVICE = """
name = "NVIDIA H20"
compute_capability = "9.0a"
core_count = 78
clock_rate_ghz = 1.98
fpus_per_core = 128
device_memory_size = 102_000_000_000
memory_bandwidth = 4_000_000_000_000
l2_cache_size = 62_914_560
shared_memory_per_core = 233_472
shared_memory_per_block_optin = 232_448
threads_per_core_limit = 2048
bf16_flops = 148e12
active_links = 18
pcie_bandwidth = 68_719_476_736
"""
MINE = """
[targets.mine]
platform = "cuda"
device = "devices/mine.toml"
topology = "1x1x2"
"""


def test_a_device_that_a_file_describes(tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "mine.toml").write_text(f'doc = "For one country."\nsource = "measured"\n{DEVICE}')
    (tmp_path / "m.toml").write_text(HEAD + FUNCTION + MINE)
    target = load_manifest(tmp_path / "m.toml", "models/m.toml").targets["mine"]
    assert isinstance(target, GpuSpec)
    assert (target.device, target.topology) == ("devices/mine.toml", "1x1x2")
    assert (target.figures["name"], target.figures["core_count"]) == ("NVIDIA H20", 78)
    assert target.figures["threads_per_warp"] == 32
    assert "doc" not in target.figures
    assert list(target_files(tmp_path / "m.toml")) == ["devices/mine.toml"]


AMD = """
name = "AMD Instinct MI308X"
compute_capability = "gfx942:sramecc+:xnack-"
core_count = 80
clock_rate_ghz = 2.1
fpus_per_core = 128
device_memory_size = 206_141_652_992
memory_bandwidth = 5_300_000_000_000
l2_cache_size = 4_194_304
shared_memory_per_core = 65_536
shared_memory_per_block_optin = 65_536
threads_per_core_limit = 2048
threads_per_warp = 64
bf16_flops = 188e12
active_links = 7
pcie_bandwidth = 68_719_476_736
infinity_fabric_bandwidth = 448e9
"""


def test_a_file_describes_a_device_of_the_vendor_of_its_platform(tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "mine.toml").write_text(AMD)
    mine = MINE.replace('"cuda"', '"rocm"')
    (tmp_path / "m.toml").write_text(HEAD + FUNCTION + mine)
    target = load_manifest(tmp_path / "m.toml", "m.toml").targets["mine"]
    assert isinstance(target, GpuSpec)
    assert (target.platform, target.figures["shared_memory_per_block"]) == ("rocm", 65536)
    assert target.jax_device()["compute_capability"] == "gfx942"
    (tmp_path / "devices" / "mine.toml").write_text(DEVICE)
    assert problems_of(HEAD + FUNCTION + mine, tmp_path).splitlines() == [
        "devices/mine.toml: threads_per_warp: missing key: without it XLA stops, or makes code for another device",
        'devices/mine.toml: compute_capability: "9.0a" is not a compute capability',
        '  write for example "gfx942:sramecc+:xnack-", as rocminfo prints it',
    ]


def test_all_that_is_wrong_with_a_device_and_the_manifest_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    text = DEVICE.replace("core_count", "core_cuont").replace('"9.0a"', '"sm_90"')
    (tmp_path / "devices" / "mine.toml").write_text(text)
    (tmp_path / "m.toml").write_text(HEAD + MINE + FUNCTION.replace('["cpu"]', '["mine", "h100"]'))
    with pytest.raises(StagecError) as caught:
        load_manifest(tmp_path / "m.toml", "models/m.toml")
    assert str(caught.value) == dedent(
        """\
        models/devices/mine.toml: core_count: missing key: without it XLA stops, or makes code for another device
        models/devices/mine.toml: compute_capability: "sm_90" is not a compute capability
          write for example "8.9", or "9.0a" for all of an H100
        models/devices/mine.toml: core_cuont: unknown key
          did you mean "core_count"?
        models/m.toml: functions.f.targets[1]: unknown target "h100"
          did you mean "h100-pcie" or "h100-sxm"?"""
    )


@pytest.mark.parametrize(
    ("target", "problems"),
    [
        (
            'platform = "cuda"\ndevice = "h201"',
            ['targets.t.device -> "h200"'],
        ),
        (
            'platform = "rocm"\ndevice = "h200"',
            ["targets.t.device -> write one of mi210"],
        ),
        (
            'platform = "cuda"\ndevice = "none.toml"',
            ["targets.t.device"],
        ),
        (
            'platform = "cuda"\ndevice = "../none.toml"',
            ['targets.t.device -> device = "h100-sxm"'],
        ),
        (
            'platform = "cuda"\ndevice = "h200"\nautotuning = "none.textproto"',
            ["targets.t.autotuning"],
        ),
        (
            'platform = "cuda"\ndevice = "h200"\nautotuning = "../none.textproto"',
            ['targets.t.autotuning -> autotuning = "kernels.autotune.textproto"'],
        ),
        (
            'platform = "cuda"\ndevice = "h200"\nautotuning = "results.pb"',
            ['targets.t.autotuning -> autotuning = "kernels.autotune.textproto"'],
        ),
        (
            'platform = "cuda"\ndevice = "h200"\ntopology = "8"',
            ["targets.t.topology"],
        ),
        (
            'platform = "tpu"\ntopology = "v7x:2x2x1"',
            ['targets.t.topology -> "tpu7x"'],
        ),
        (
            'platform = "tpu"\ntopology = "v6e:4x2"\nchips_per_host = "2x4"',
            ["targets.t.chips_per_host"],
        ),
    ],
    ids=[
        "device",
        "device of another vendor",
        "no file",
        "file above",
        "no results",
        "results above",
        "other results",
        "topology",
        "generation",
        "hosts",
    ],
)
def test_hardware_that_does_not_exist(
    request: pytest.FixtureRequest, target: str, problems: list[str], tmp_path: Path
) -> None:
    text = f"{HEAD}{FUNCTION}[targets.t]\n{target}\n"
    MESSAGES.check(request.node, refusal_of(text, tmp_path), problems)


def test_results_of_autotuning(tmp_path: Path) -> None:
    text = f'{HEAD}{FUNCTION}[targets.t]\nplatform = "cuda"\ndevice = "h200"\nautotuning = "t.textproto"\n'
    (tmp_path / "m.toml").write_text(text)
    (tmp_path / "t.textproto").write_text("# none yet\n")
    target = load_manifest(tmp_path / "m.toml", "models/m.toml").targets["t"]
    assert isinstance(target, GpuSpec)
    assert (target.autotuning, target.autotuning_results) == ("t.textproto", "# none yet\n")
    (tmp_path / "t.textproto").write_bytes(b"\x08\x03\xff")
    with pytest.raises(StagecError) as caught:
        load_manifest(tmp_path / "m.toml", "models/m.toml")
    assert str(caught.value) == (
        "models/t.textproto: not text: 'ascii' codec can't decode byte 0xff in position 2: ordinal not in range(128)\n"
        "  save it in protobuf's text format, as XLA writes it into a file whose name ends so"
    )


def test_a_topology_that_does_not_exist_is_told_where_a_function_names_it(tmp_path: Path) -> None:
    assert problems_of(HEAD + FUNCTION.replace('"cpu"', '"v5e:3x3", "v6p:2x2"'), tmp_path) == dedent(
        """\
        m.toml: functions.f.targets[0]: v5e:3x3: a slice consists of whole hosts, and a host has 2x2 chips
          write for example v5e:2x4, v5e:2x8 or v5e:4x4
        m.toml: functions.f.targets[1]: there is no TPU generation v6p; libtpu knows v2, v3, v4, v5e, v5p, v6e, tpu7x
          did you mean "v6e"?"""
    )


def test_files_of_devices_are_known_also_where_a_manifest_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text('targets.a = 1\ntargets.b.device = "b.toml"\ntargets.c.device = "../c.toml"\n')
    assert list(target_files(tmp_path / "m.toml")) == ["b.toml"]
    (tmp_path / "m.toml").write_text('targets.a = { device = "h200", autotuning = "b.textproto" }\n')
    assert list(target_files(tmp_path / "m.toml")) == ["b.textproto"]
    (tmp_path / "m.toml").write_text("[targets")
    assert list(target_files(tmp_path / "m.toml")) == []
    assert list(target_files(tmp_path / "none.toml")) == []


_KEYS = sorted({key for model in MODELS for key in model.model_fields})
_VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(-2, 9), st.floats(), st.sampled_from(["", "cpu", "f32[n]", "a:b", "\n", "é"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(_KEYS), inner, max_size=4)),
    max_leaves=12,
)
_TABLE = st.dictionaries(st.sampled_from(_KEYS), _VALUES)


@given(function=_TABLE, target=_TABLE)
def test_any_toml_is_explained(tmp_path_factory: pytest.TempPathFactory, function: object, target: object) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(f"functions = {show({'f': function})}\ntargets = {show({'t': target})}\n", encoding="utf-8")
    with pytest.raises(StagecError) as caught:
        load_manifest(path)
    for problem in caught.value.problems:
        assert problem.what
        assert "pydantic" not in str(problem)
        assert "type=" not in str(problem)
        assert "Input should" not in str(problem)
        assert "of the right form" not in str(problem)


def test_variables_for_tracing(tmp_path: Path) -> None:
    text = HEAD.replace('version = "1"', 'version = "1"\nenvironment = { A = "1", EQX_ON_ERROR = "nan" }')
    path = tmp_path / "manifest.toml"
    path.write_text(text + FUNCTION + 'environment = { KERAS_BACKEND = "jax", A = "", a1_ = "\\u00e9 =" }')
    manifest = load_manifest(path, "m.toml")
    assert manifest.header.environment == {"A": "1", "EQX_ON_ERROR": "nan"}
    assert manifest.functions["f"].environment == {"A": "", "KERAS_BACKEND": "jax", "a1_": "\u00e9 ="}


JAX_READS = "JAX reads its variables before the manifest's are set"
REFUSED_VARIABLES = {
    '"A-B" = "1"': ("A-B", "not a name of a variable", "write letters, digits and _, no digit first"),
    "A = 1": ("A", "1 is not a string", 'write A = "1"'),
    "A = true": ("A", "true is not a string", 'write A = "true"'),
    'A = "\\u0000"': ("A", "a variable cannot hold the character 0", "leave that character out"),
    'JAX_ENABLE_X64 = "1"': ("JAX_ENABLE_X64", JAX_READS, "write enable_x64 = true"),
    'JAX_DEFAULT_MATMUL_PRECISION = "high"': (
        *("JAX_DEFAULT_MATMUL_PRECISION", JAX_READS, 'write for example matmul_precision = "highest"'),
    ),
    'JAX_DEFAULT_PRNG_IMPL = "rbg"': ("JAX_DEFAULT_PRNG_IMPL", JAX_READS, 'write for example prng_impl = "rbg"'),
    'JAX_PLATFORMS = "cpu"': (
        *("JAX_PLATFORMS", JAX_READS, 'list targets instead, for example targets = ["cpu-avx2"]'),
    ),
    'JAX_LOG_COMPILES = "1"': (*("JAX_LOG_COMPILES", JAX_READS, "call jax.config.update in the module of the entry"),),
    'XLA_FLAGS = "--x"': (
        "XLA_FLAGS",
        "the compiler reads it, and tracing compiles nothing",
        "write its flags as compiler_options of a target",
    ),
    'PYTHONPATH = "x"': (
        "PYTHONPATH",
        "imports come from inputs of the build",
        "name the modules in deps, their folders in imports",
    ),
    'PYTHONHASHSEED = "1"': (
        "PYTHONHASHSEED",
        "Python reads it when it starts, and stagec sets what matters",
        "leave it out",
    ),
    'PATH = "/x"': ("PATH", "programs and libraries come from inputs of the build", "name files in deps or data"),
    'LD_PRELOAD = "/x"': (
        *("LD_PRELOAD", "programs and libraries come from inputs of the build", "name files in deps or data"),
    ),
    'MALLOC_ARENA_MAX = "1"': (
        *("MALLOC_ARENA_MAX", "the C library reads it when the process starts", "leave it out"),
    ),
    'HOME = "/x"': ("HOME", "it belongs to a machine, and every machine makes the same artifact", "leave it out"),
    'CUDA_VISIBLE_DEVICES = "0"': (
        *("CUDA_VISIBLE_DEVICES", "tracing has no device", 'list targets, for example targets = ["h100-sxm"]'),
    ),
    'TZ = "UTC"': ("TZ", "stagec sets it itself, the same for every function", "leave it out"),
    'OMP_NUM_THREADS = "1"': (
        *("OMP_NUM_THREADS", "stagec sets it itself, the same for every function", "leave it out"),
    ),
}


@pytest.mark.parametrize("written", REFUSED_VARIABLES)
def test_a_variable_that_is_refused(written: str, tmp_path: Path) -> None:
    key, what, write = REFUSED_VARIABLES[written]
    message = f"m.toml: functions.f.environment.{key}: {what}\n  {write}"
    assert problems_of(f"{HEAD}{FUNCTION}environment = {{ {written} }}", tmp_path) == message


def test_settings_of_tracing_that_are_none(tmp_path: Path) -> None:
    header = 'version = "1"\nprng_impl = "philox"\nhost_callbacks = true\nenvironment = ["A"]'
    function = FUNCTION + 'enable_x64 = "yes"\nhost_callbacks = "ignore"\nenvironment = { PATH = "", TZ = "" }'
    assert problems_of(HEAD.replace('version = "1"', header) + function, tmp_path) == dedent(
        """\
        m.toml: manifest.prng_impl: unknown value "philox"
          write one of "threefry2x32", "rbg", "unsafe_rbg"
        m.toml: manifest.environment: ["A"] is not a table
          write for example { EQX_ON_ERROR = "nan" }
        m.toml: manifest.host_callbacks: unknown value true
          write one of "refuse", "drop"
        m.toml: functions.f.enable_x64: "yes" is not true or false
          write for example enable_x64 = true
        m.toml: functions.f.environment.PATH: programs and libraries come from inputs of the build
          name files in deps or data
        m.toml: functions.f.environment.TZ: stagec sets it itself, the same for every function
          leave it out
        m.toml: functions.f.host_callbacks: unknown value "ignore"
          write one of "refuse", "drop\""""
    )


def test_a_file_is_not_traced(tmp_path: Path) -> None:
    text = HEAD + '[functions.f]\nentry = "f.mlir"\ntargets = ["cpu"]\nenvironment = { A = "1" }\nenable_x64 = true'
    assert problems_of(text, tmp_path) == dedent(
        """\
        m.toml: functions.f.enable_x64: f.mlir is a StableHLO module, which is not traced
          leave enable_x64 out; the module itself says it
        m.toml: functions.f.environment: f.mlir is a StableHLO module, which is not traced
          leave environment out; the module itself says it"""
    )
