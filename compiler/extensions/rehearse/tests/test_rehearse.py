"""Rehearsals on CPUs: what a program compiles is found, written the same each time, built, and then found by JAX.

Modules: `stagec_rehearse/commands/program_report.py`, `stagec_rehearse/commands/program_spec.py`,
`stagec_rehearse/commands/rehearse.py`, `stagec_rehearse/observing.py`, `stagec_rehearse/programs.py`,
`stagec_rehearse/report.py`, `stagec_rehearse/running.py`, `stagec_rehearse/start/sitecustomize.py`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from compiler.extensions.rehearse.tests.processes import built, hits, reported, rows, run, specified, stagec
from stagec.building.limits import in_bytes
from stagec_rehearse import programs
from tests.building import ROOT
from tests.users import needs_isolation

PROGRAM = """
import sys
import jax, jax.numpy as jnp
import optax
from flax import nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)

model = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

@nnx.jit
def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss

for _ in range(3):
    loss = step(model, optimizer, jnp.ones((4, 8)))
print("devices", len(jax.devices()), "loss", float(loss))
"""
STORM = """
import jax, jax.numpy as jnp
import numpy as np
table = np.random.default_rng(0).random((600, 600))
double = jax.jit(lambda x: x * 2)
for size in range(1, 8):
    double(np.ones(size, np.float32))
print(jax.jit(lambda x: x + table)(np.float32(1)).shape)
"""


def rehearse(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return stagec("rehearse", "--device", "cpu", *words, cwd=cwd)


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.py, and the rehearsal of it."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "train.py").write_text(PROGRAM)
    done = rehearse("--", sys.executable, "train.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "devices 1 loss " in done.stdout
    assert "rehearsed on cpu: " in done.stdout
    return folder


def test_all_that_a_program_compiles(rehearsed: Path) -> None:
    listed = programs.read(str(rehearsed / "rehearsal" / programs.NAME))
    names = [program.name for program in listed.programs]
    assert "jit_step" in names
    assert len(names) > 10
    (step,) = (program for program in listed.programs if program.name == "jit_step")
    assert step.runs == 3
    assert step.line == f"train.py:{1 + PROGRAM[: PROGRAM.index('loss = step(')].count(chr(10))}"
    assert "f32[8,16]" in step.arguments
    assert {program.file for program in listed.programs} == {
        path.stem for path in (rehearsed / "rehearsal" / "programs").iterdir()
    }


def test_the_same_run_writes_the_same_bytes(rehearsed: Path, tmp_path: Path) -> None:
    """In another folder, too."""
    (tmp_path / "train.py").write_text(PROGRAM)
    done = rehearse(
        "-o",
        "again",
        "--compare",
        rehearsed / "rehearsal" / programs.NAME,
        "--",
        sys.executable,
        "train.py",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
    assert "other than before" not in done.stdout
    assert (tmp_path / "again" / programs.NAME).read_bytes() == (rehearsed / "rehearsal" / programs.NAME).read_bytes()


def test_jax_finds_all_that_was_built(rehearsed: Path, tmp_path: Path) -> None:
    """The program is not changed, and compiles nothing. The page of the build has each program.

    `stagec build` does the same.
    """
    rehearsal = rehearsed / "rehearsal"
    cache, count = built(rehearsal, "cpu-avx2", tmp_path)
    counts = hits("train.py", cache, rehearsed, JAX_PLATFORMS="cpu")
    assert counts["cache_hits"] == counts["compile_requests_use_cache"] == count
    listed = programs.read(str(rehearsal / programs.NAME)).programs
    done = reported(rehearsal, "cpu-avx2", sorted(tmp_path.glob("*.costs.json")), tmp_path)
    assert done.returncode == 0, done.stderr
    size = {each.file: (tmp_path / f"{each.file}.xla").stat().st_size for each in listed}
    shown = [tuple(cells[3:]) for cells in rows(tmp_path / "report.html")]
    assert sorted(shown) == sorted(
        (in_bytes(size[each.file]), str(each.runs), "cpu-avx2", each.name, each.line) for each in listed
    )
    (step,) = (cells for cells in rows(tmp_path / "report.html") if cells[-2] == "jit_step")
    assert float(step[1]) > 2 * 4 * 8 * 16
    assert step[2] == "unknown"  # an instruction set has no peak
    runs, whole = sum(each.runs for each in listed), in_bytes(sum(size.values()))
    said = f"built for cpu-avx2: {count} programs, {whole}, run {runs} times in the rehearsal"
    assert said in (tmp_path / "report.html").read_text()
    needs_isolation()
    words = ["--target", "cpu-avx2", "--jax-cache", "cache", "--artifacts", "all"]
    folder = tmp_path / "a:gain"  # words of actions have colons between paths
    done = build(folder, rehearsal, *words, "--statement", "s.json", "--sbom", "b.json")
    assert done.returncode == 0, done.stderr
    written = {path.name: path.read_bytes() for path in (folder / "cache").iterdir()}
    assert written == {path.name: path.read_bytes() for path in cache.iterdir()}
    assert (folder / "all" / "programs.report.html").read_bytes() == (tmp_path / "report.html").read_bytes()
    statement = json.loads((folder / "s.json").read_text())
    layer = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
    assert layer.pop("programs.jax_cache.tar") == sha256(folder / "programs.jax_cache.tar")
    assert layer == {f"programs.jax_cache/{path.name}": sha256(path) for path in cache.iterdir()}
    resolved = {
        each["name"]: each["digest"]["sha256"]
        for each in statement["predicate"]["buildDefinition"]["resolvedDependencies"]
        if "uri" not in each
    }
    keys = (rehearsal / "programs").iterdir()
    assert resolved == {
        "re:hearsal/programs.toml": sha256(rehearsal / programs.NAME),
        **{f"re:hearsal/programs/{key.name}": sha256(key) for key in keys},
    }
    component = json.loads((folder / "b.json").read_text())["metadata"]["component"]
    assert component["name"] == "programs.jax_cache.tar"
    assert "0 actions ran" in build(folder, None, *words).stdout
    toml = folder / "re:hearsal" / programs.NAME
    toml.write_text(toml.read_text().replace("runs = 3", "runs = 4"))  # only the page has it
    assert "2 actions ran" in build(folder, None, *words).stdout
    assert {path.name: path.read_bytes() for path in (folder / "cache").iterdir()} == written


def build(folder: Path, rehearsal: Path | None, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `stagec build` for a copy of a rehearsal, in a workspace."""
    if rehearsal:
        shutil.copytree(rehearsal, folder / "re:hearsal")
        (folder / "pyproject.toml").touch()
    command = ("-m", "stagec", "build", f"re:hearsal/{programs.NAME}", *words)
    return run(*command, cwd=folder, XDG_CACHE_HOME=str(folder.parent / "store"))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_rehearsal_that_cannot_be_built(rehearsed: Path, tmp_path: Path) -> None:
    needs_isolation()
    folder = tmp_path / "workspace"
    done = build(folder, rehearsed / "rehearsal", "--function", "step", "--import-root", "src", "--data", "x.npz")
    assert (done.returncode, done.stderr) == (
        2,
        "re:hearsal/programs.toml: a rehearsal names no targets\n"
        "  name what it was rehearsed for: --target cpu-avx2, --target h100-sxm or --target v5e:2x4\n"
        "re:hearsal/programs.toml: --function is for a manifest, and this is a rehearsal\n  leave it out\n"
        "re:hearsal/programs.toml: --import-root is for a manifest, and this is a rehearsal\n  leave it out\n"
        "re:hearsal/programs.toml: --data is for a manifest, and this is a rehearsal\n  leave it out\n",
    )
    done = build(folder, None, "--target", "h100-sxm")
    assert done.returncode == 2
    assert "re:hearsal/programs.toml: device: it was rehearsed on cpu, and the target is h100-sxm\n" in done.stderr
    code = f"import stagec; stagec.build('re:hearsal/{programs.NAME}', targets=['cpu-avx2'])"
    done = run("-c", code, cwd=folder, XDG_CACHE_HOME=str(tmp_path / "store"))
    assert done.stderr.endswith(
        "StagecError: re:hearsal/programs.toml: a rehearsal has no bundle to load\n  build it with stagec build\n"
    )


def test_what_the_report_of_a_build_tells(tmp_path: Path) -> None:
    """Programs that are not built, settings, defects of XLA, and what a device takes at least."""
    costs = tmp_path / f"{'a' * 64}.costs.json"
    roofline = {"seconds": 2.5e-6, "bound": "memory"}
    written = {"size": 5000, "avoided": {"xla#1": "xla_o"}, "peak_bytes": "unknown", "flops": 10, "roofline": roofline}
    costs.write_text(json.dumps(written))
    head = 'format = 1\ndevice = "h100-sxm"\ndevices = 1\n[versions]\n'
    kept = f'[[programs]]\nname = "f<b>"\nline = "x.py:3"\nruns = 2\nfile = "{"a" * 64}"\n'
    kept += 'settings = { x64 = "True" }\n'
    lost = '[[programs]]\nname = "g"\nline = "x.py:4"\nnot_kept = "it calls back"\n'
    (tmp_path / programs.NAME).write_text(head + kept + lost)
    done = reported(tmp_path, "h100-sxm", [costs], tmp_path)
    assert done.returncode == 0, done.stderr
    figures = ["unknown", "10", "2.5 \N{MICRO SIGN}s, memory", "4.9 KiB", "2"]
    assert rows(tmp_path / "report.html") == [[*figures, "h100-sxm", "f&lt;b&gt;", "x.py:3"]]
    page = (tmp_path / "report.html").read_text()
    assert "<li>1 with x64 = True</li>" in page
    assert "<li>xla#1 is avoided, with xla_o: f&lt;b&gt; (x.py:3) for h100-sxm</li>" in page
    assert "<h2>Not built, so JAX compiles it at each start</h2>\n<ul>\n<li>g (x.py:4): it calls back</li>" in page
    costs.write_text(json.dumps({**written, "flops": "many"}))
    done = reported(tmp_path, "h100-sxm", [costs], tmp_path)
    assert done.returncode == 2
    assert f'{costs}: not the costs of a program: flops: expected a number or "unknown"' in done.stderr
    other = costs.with_name(f"{'b' * 64}.costs.json")
    other.write_text(json.dumps(written))
    done = reported(tmp_path, "h100-sxm", [other], tmp_path)
    assert done.returncode == 2
    assert "the costs of f<b> (x.py:3) for h100-sxm are not given\n" in done.stderr


def test_keys_that_are_not_those_of_the_programs(rehearsed: Path, tmp_path: Path) -> None:
    rehearsal = tmp_path / "rehearsal"
    shutil.copytree(rehearsed / "rehearsal", rehearsal)
    missing, changed, *others = sorted((rehearsal / "programs").iterdir())
    changed.write_bytes(changed.read_bytes() + b"x")
    strange = rehearsal / "programs" / f"{'0' * 64}.key"
    strange.touch()
    toml = rehearsal / programs.NAME
    toml.write_text(toml.read_text() + '[[programs]]\nname = "f"\nline = "x.py:3"\nerror = "KeyError: 1"\n')
    done = specified(rehearsal, "h100-sxm", [changed, *others, strange], tmp_path)
    assert done.returncode == 2
    for said in (
        f"it was rehearsed on cpu, and the target is h100-sxm ({toml}: device)",
        f"programs/{missing.name}, is not among the files",
        f"its content has another digest than its name ({changed})",
        f"it is the key of no program ({strange})",
        f"the key of f (x.py:3) is not known: KeyError: 1 ({toml}: programs)",
    ):
        assert f"//a:b: {said}" in done.stderr or said in done.stderr, said
    assert not (tmp_path / "spec.json").exists()


def test_storms_constants_and_budget(tmp_path: Path) -> None:
    (tmp_path / "storm.py").write_text(STORM)
    (tmp_path / "rehearsal").mkdir()
    budget = '[budget]\nprograms = 3\nmemory = "1MiB"\n'
    head = 'format = 1\ndevice = "cpu"\ndevices = 1\n[versions]\n'
    (tmp_path / "rehearsal" / programs.NAME).write_text(head + budget)
    done = rehearse("--devices", "2", "--", sys.executable, "storm.py", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert (
        "jit__lambda (storm.py:7) was compiled 7 times: argument 0 is another aval each time: f32[1], f32[2]"
        in done.stdout
    )
    assert "jit__lambda (storm.py:8) has f32[600,600], 1.4 MiB: pass it as an argument" in done.stdout
    assert "programs, and the budget has 3" in done.stdout
    assert "jit__lambda (storm.py:8) takes 1.4 MiB, and the budget has 1MiB" in done.stdout
    written = tomllib.loads((tmp_path / "rehearsal" / programs.NAME).read_text())
    assert written["budget"] == {"programs": 3, "memory": "1MiB"}
    assert written["devices"] == 2


def test_what_differs_from_before(tmp_path: Path) -> None:
    program = "import jax, numpy as np\njax.jit(lambda x: x + 1)(np.ones({size}, np.float32))\n"
    (tmp_path / "one.py").write_text(program.format(size=4))
    assert rehearse("--", sys.executable, "one.py", cwd=tmp_path).returncode == 0
    (tmp_path / "one.py").write_text(program.format(size=5) + "jax.jit(lambda x: x - 1)(np.float32(2))\n")
    words = ["-o", "new", "--compare", f"rehearsal/{programs.NAME}", "--", sys.executable, "one.py"]
    done = rehearse(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert "other than before:" in done.stdout
    assert "changed: jit__lambda (one.py:2): arguments were ['f32[4]'], and are ['f32[5]']" in done.stdout
    assert "new: jit__lambda (one.py:3)" in done.stdout


def test_a_program_that_never_ends(tmp_path: Path) -> None:
    program = (
        "import jax, numpy as np, time\njax.jit(lambda x: x + 1)(np.float32(1))\nwhile True:\n    time.sleep(0.1)\n"
    )
    (tmp_path / "serve.py").write_text(program)
    done = rehearse("--idle", "1", "--", sys.executable, "serve.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "then ended: it compiled nothing for 1 s, and was at serve.py:4" in done.stdout
    assert len(programs.read(str(tmp_path / "rehearsal" / programs.NAME)).programs) == 1


def test_a_program_that_fails_is_told_and_listed(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import jax\njax.jit(lambda x: x + 1)(1.0)\nraise SystemExit(3)\n")
    done = rehearse("--", sys.executable, "fails.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "until it failed with status 3" in done.stdout
    done = rehearse("--", "no-such-program", cwd=tmp_path)
    assert done.returncode == 2
    assert "no-such-program cannot be started: No such file or directory" in done.stderr
    done = stagec("rehearse", "--device", "h100-sxn", "--", sys.executable, "fails.py", cwd=tmp_path)
    assert done.returncode == 2
    assert 'unknown device "h100-sxn"' in done.stderr
    done = stagec("rehearse", "--device", "mi300", "--", sys.executable, "fails.py", cwd=tmp_path)
    assert 'unknown device "mi300"' in done.stderr
    assert "mi300x" in done.stderr


def test_other_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / programs.NAME).write_text("format = 2\n")
    done = rehearse("--compare", programs.NAME, "--", sys.executable, "x.py", cwd=tmp_path)
    assert done.returncode == 2
    assert f"{programs.NAME}: format: 2 is not a format of programs" in done.stderr
    (tmp_path / programs.NAME).write_text(
        'format = 1\ndevices = "2"\n[[programs]]\nname = 1\nother = 2\nfile = "../x"\n'
    )
    done = rehearse("--compare", programs.NAME, "--", sys.executable, "x.py", cwd=tmp_path)
    assert done.returncode == 2
    for text in (
        "device: missing key",
        "devices: '2' is not a whole number",
        "programs[0].other: unknown key",
        "'../x' is not a SHA-256",
    ):
        assert text in done.stderr
    (tmp_path / programs.NAME).write_text('format = 1\ndevice = "cpu"\ndevices = 1\n[versions]\n[budget]\nflops = 1\n')
    done = rehearse("-o", ".", "--", sys.executable, "x.py", cwd=tmp_path)
    assert done.returncode == 2
    assert f"{programs.NAME}: budget.flops: 1 is not a budget" in done.stderr


def test_a_program_that_nobody_observed_is_told(tmp_path: Path) -> None:
    done = rehearse("--", sys.executable, "-I", "-c", "print(1)", cwd=tmp_path)
    assert (done.returncode, done.stdout[:2]) == (1, "1\n")
    assert "not rehearsed, so nothing was written:\n  no process of the program has imported JAX" in done.stdout
    assert not (tmp_path / "rehearsal").exists()


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")
@pytest.mark.parametrize(
    ("device", "plugin", "install"),
    [
        ("h100-sxm", "jax-cuda13-plugin", "jax[cuda13]"),
        ("mi300x", "jax-rocm7-plugin", "jax[rocm7-local] and jax-rocm7-pjrt"),
    ],
)
def test_a_program_without_the_plugin_is_told(tmp_path: Path, device: str, plugin: str, install: str) -> None:
    if importlib.util.find_spec(plugin.replace("-", "_")) is not None:
        pytest.skip(f"{plugin} is installed")
    words = ["--device", device, "--", sys.executable, "-c", "import jax; jax.devices()"]
    done = stagec("rehearse", *words, cwd=tmp_path)
    assert done.returncode == 1
    assert f"the program's Python has no {plugin}: install {install} there" in done.stdout


def test_words_of_the_program_stay_as_they_are(tmp_path: Path) -> None:
    """Those of stagec may be in a file."""
    (tmp_path / "words").write_text("--other\n")
    program = "import jax, sys; print(sys.argv[1:])"
    done = rehearse("--", sys.executable, "-c", program, "@words", "--device", "--", "x", cwd=tmp_path)
    assert done.stdout.startswith("['@words', '--device', '--', 'x']\n"), done.stderr


def test_other_files_stay(tmp_path: Path) -> None:
    """A file that ends with .key may be anything; and no link is followed."""
    program = "import jax, sys; jax.jit(lambda x: x + int(sys.argv[1]))(1.0)"
    assert rehearse("--", sys.executable, "-c", program, "1", cwd=tmp_path).returncode == 0
    folder = tmp_path / "rehearsal" / "programs"
    (first,) = folder.iterdir()
    (folder / "server.key").write_text("secret")
    assert rehearse("--", sys.executable, "-c", program, "2", cwd=tmp_path).returncode == 0
    assert (folder / "server.key").read_text() == "secret"
    assert not first.exists()
    assert len([*folder.iterdir()]) == 2
    (tmp_path / "other").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "other" / "programs").symlink_to(tmp_path / "elsewhere")
    done = rehearse("-o", "other", "--", sys.executable, "-c", program, "3", cwd=tmp_path)
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert [*(tmp_path / "elsewhere").iterdir()] == []


def test_the_program_of_the_page(tmp_path: Path) -> None:
    """Its command, on a CPU; the table has the programs and lines that the page shows. examples/rehearsal has both."""
    page = (ROOT / "docs" / "rehearse.md").read_text("utf-8")
    (program,) = re.findall(r"```python\n(# train.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    done = rehearse("--", sys.executable, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [tuple(row.split()[-2:]) for row in done.stdout.splitlines() if "train.py:" in row]
    (shown,) = re.findall(r"```text\n(rehearsed on .*?)```", page, re.DOTALL)
    wanted = [tuple(row.split()[-2:]) for row in shown.splitlines() if "train.py:" in row]
    assert len(wanted) == 2
    assert set(wanted) <= set(rows)
    listed = programs.read(str(tmp_path / "rehearsal" / programs.NAME))
    (step,) = (row for row in listed.programs if row.name == "jit_step")
    (table,) = re.findall(r"```text\n(\[\[programs\]\].*?)```", page, re.DOTALL)
    (row,) = tomllib.loads(table)["programs"]
    assert (row["line"], row["runs"]) == (step.line, step.runs)
    assert row["arguments"] == [*step.arguments][: len(row["arguments"])]
    needs_isolation()
    (line,) = re.findall(r"```sh\n(stagec build .*)\n", page)
    done = run("-m", *line.split(), cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr
    words = ["--jax-cache", "train.jax_cache", "--report", "page.html"]
    done = rehearse(*words, "--", sys.executable, "train.py", cwd=tmp_path)
    (found,) = re.findall(r"```text\n(found in .*?)```", page, re.DOTALL)
    assert (done.returncode, found in done.stdout) == (0, True), done.stdout
    example = ROOT / "examples" / "rehearsal"
    assert (example / "train.py").read_text("utf-8") == program
    kept = programs.read(str(example / "rehearsal" / programs.NAME))
    if kept.versions == listed.versions:
        assert kept == listed
