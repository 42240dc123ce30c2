"""The wheel: what a serving machine installs, in a virtual environment of its own, without jax."""

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy as np
import pip
import pytest

import stagec
from stagec.cli import COMMANDS
from stagec.core.builds import extensions
from stagec.core.builds.version import VERSION
from stagec.pjrt.compatibility import version as jaxlib_version
from tests.building import COMPILER, ROOT, build
from tests.bundles import without_executables

SCRIPT = """
import importlib.util, sys
import numpy as np
import stagec

assert importlib.util.find_spec("jax") is None
assert importlib.util.find_spec("pydantic") is None
bundle = stagec.load(sys.argv[1])
state = bundle["init"](np.uint32(0))
result = bundle["predict"](state["params"], np.zeros((8, 64), np.float32))
print(stagec.__version__, sorted(bundle), result["digit"].shape, result["digit"].dtype)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel, of the package's own files without git."""
    return _built(_sources(tmp_path_factory.mktemp("wheel") / "source"), "--wheel")


def _sources(source: Path) -> Path:
    for path in [
        *COMPILER.glob("stagec/**/*.py"),
        *COMPILER.glob("stagec/patches/*.json"),
        *COMPILER.glob("stagec/targets/*.toml"),
        *COMPILER.glob("extensions/*/stagec_*/**/*.py"),
        *COMPILER.glob("extensions/*/*.*"),
        *COMPILER.glob("extensions/insight/stagec_insight/page/*"),
        *COMPILER.glob("extensions/grpc/stagec_grpc/*.binpb"),
        *COMPILER.glob("extensions/rehearse/stagec_rehearse/*.c"),
        *(
            COMPILER / n
            for n in (
                "stagec/py.typed",
                "stagec/releases.toml",
                "build_backend.py",
                "pyproject.toml",
                "MANIFEST.in",
                "README.md",
            )
        ),
    ]:
        target = source / path.relative_to(COMPILER)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return source


def _built(source: Path, *options: str) -> Path:
    out = source.parent / "out"
    _run(sys.executable, "-m", "build", *options, "--no-isolation", "--outdir", out, source)
    (file,) = out.glob("*.whl")
    return file


def _run(*command: str | Path, **env: str) -> str:
    path = os.pathsep.join(entry for entry in sys.path if entry.endswith("site-packages"))
    done = subprocess.run(
        list(map(str, command)), env={**os.environ, "PYTHONPATH": path, **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_needs_no_jax_and_no_pydantic(wheel: Path) -> None:
    assert wheel.name == f"stagec-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"stagec-{VERSION}.dist-info/METADATA").decode()
    required = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if "Requires-Dist" in line]
    plain = [line for line in required if "extra ==" not in line]
    assert sorted(re.split(r"[<>=]", line)[0] for line in plain) == ["flatbuffers", "jaxlib", "numpy"]
    extras = {
        extra: {re.split(r"[<>=;]", line)[0].strip() for line in required if f'extra == "{extra}"' in line}
        for extra in ("compiler", "signing")
    }
    assert extras == {"compiler": {"jax", "pydantic"}, "signing": {"cryptography"}}
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.startswith(("stagec_", "extensions"))]


@pytest.mark.parametrize("options", [("--wheel",), ("--sdist", "--wheel"), ()], ids=["wheel", "both", "of the sdist"])
def test_the_wheel_is_the_same_bytes_everywhere(wheel: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    before = os.umask(0o077)
    try:
        source = _sources(tmp_path / "elsewhere" / "source")
        for path in source.rglob("*"):
            path.chmod(0o700)
            os.utime(path, (10**9, 10**9))
        assert _built(source, *options).read_bytes() == wheel.read_bytes()
    finally:
        os.umask(before)


def test_the_commands_that_install(tmp_path: Path) -> None:
    """Those of two pages, in a checkout: first a server's, whose environment has the fewest packages."""
    _sources(tmp_path / "compiler")
    for page, count in (("serving.md", 3), ("install.md", 7)):
        text = (ROOT / "docs" / page).read_text("utf-8")
        blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        lines = [line for block in blocks if "pip" in block or page == "install.md" for line in block.splitlines()]
        assert len(lines) == count
        for line in lines:
            words = shlex.split(line)
            if words[0] == "python3":
                words[0] = sys.executable
            if words[1:3] == ["-m", "pip"]:  # by its folder, as below
                words[1:3] = [str(Path(pip.__file__).parent)]
            env = {**os.environ, "PYTHONPATH": ""}
            done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
            assert done.returncode == 0, f"{line}: {done.stderr}"
            assert not line.endswith(" --version") or done.stdout == f"stagec {VERSION}\n"
        imports = "import stagec_grpc.rpc, stagec_serve.server"
        _run(tmp_path / ".venv" / "bin" / "python", "-c", imports, PYTHONPATH="")
    assert (tmp_path / f"stagec-{VERSION}-py3-none-any.whl").is_file()


def test_an_installation_leaves_nothing_and_takes_what_git_has(wheel: Path, tmp_path: Path) -> None:
    """Neither what setuptools left in the tree once, nor a file of another branch, comes into a wheel.

    What a link in the tree leads to does: a checkout has the hardware in manifests/, and a link to it.
    """
    checkout = tmp_path / "checkout"
    source = _sources(checkout / "compiler")
    (checkout / "manifests").mkdir()
    (source / "stagec" / "targets").rename(checkout / "manifests" / "targets")
    (source / "stagec" / "targets").symlink_to("../../manifests/targets")
    shutil.copy(ROOT / ".gitignore", checkout)
    git = ("git", "-C", checkout, "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "-m", "a")):
        _run(*git, *words)
    pip_ = (sys.executable, Path(pip.__file__).parent, "install", "--no-deps", "--no-build-isolation", "--quiet")
    _run(*pip_, "--target", tmp_path / "target", source)
    # Python may leave the byte code of the backend itself.
    left = _run(*git, "status", "--porcelain", "--ignored").splitlines()
    assert [line for line in left if line != "!! compiler/__pycache__/"] == []
    of_builds = "build/lib/stagec/core/gone.py", "stagec.egg-info/SOURCES.txt"
    for file in (*of_builds, "stagec/core/gone.py", "stagec/targets/gone.toml"):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).touch()
    left = _run(*git, "status", "--porcelain", "--ignored").splitlines()
    assert [line for line in left if line != "!! compiler/__pycache__/"] == [
        "?? compiler/stagec/core/gone.py",
        "?? manifests/targets/gone.toml",
        "!! compiler/build/",
        "!! compiler/stagec.egg-info/",
    ]
    assert _built(source, "--wheel").read_bytes() == wheel.read_bytes()
    (source / "stagec" / "cli" / "rebuild.py").unlink()
    with zipfile.ZipFile(_built(source, "--wheel")) as archive:
        assert "stagec/cli/rebuild.py" not in archive.namelist()


@pytest.mark.parametrize("extension", [row.name for row in extensions.EXTENSIONS])
def test_an_extension_is_built_as_the_compiler_is(extension: str, tmp_path: Path) -> None:
    """A wheel by way of the sdist, with nothing left beside the sources, and the same bytes without the sdist."""
    source = _sources(tmp_path / "source") / "extensions" / extension
    before = {path for path in source.rglob("*") if "__pycache__" not in path.parts}
    through = _built(source, "--sdist", "--wheel").read_bytes()
    assert _built(source).read_bytes() == through
    assert {path for path in source.rglob("*") if "__pycache__" not in path.parts} == before


def test_the_wheel_has_the_checked_in_hardware(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if name.endswith(".toml")}
    wanted = {f"stagec/targets/{file.name}": file.read_bytes() for file in (COMPILER / "stagec/targets").glob("*.toml")}
    wanted["stagec/releases.toml"] = (COMPILER / "stagec" / "releases.toml").read_bytes()
    assert packed == wanted
    assert "stagec/targets/nvidia.toml" in packed


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, what the wheel requires, and nothing else."""
    environment = tmp_path_factory.mktemp("plain")
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    # pip by its folder: on PYTHONPATH it would take what lies beside it for installed.
    _run(
        sys.executable,
        Path(pip.__file__).parent,
        "--python",
        python,
        "install",
        "--quiet",
        wheel,
        f"jaxlib=={jaxlib_version()}",
        PYTHONPATH="",
    )
    return python


def test_a_fresh_environment_loads_the_digits_bundle(python: Path, tmp_path: Path) -> None:
    bundle = os.environ.get("DIGITS_BUNDLE") or build("examples/digits/digits.toml", tmp_path, ROOT)
    said = _run(python, "-c", SCRIPT, Path(bundle).absolute(), PYTHONPATH="")
    assert said.split() == [VERSION, "['init',", "'predict',", "'train_step']", "(8,)", "int32"]


def test_the_wheel_alone_keeps_what_the_loader_promises(python: Path, zoo: Path, tmp_path: Path) -> None:
    portable, compiled, output = tmp_path / "portable.aot", tmp_path / "compiled", tmp_path / "results.npz"
    without_executables(zoo, portable)
    compiled.write_bytes(stagec.jit(lambda x: x * 2).lower(np.ones(8, np.float32)).compile().serialize())
    script = ROOT / "tests" / "zoo" / "promises.py"
    _run(python, "-B", script, zoo, portable, compiled, output, PYTHONPATH=str(ROOT))
    expected = tmp_path / "expected.npz"
    path = os.pathsep.join([str(COMPILER), str(ROOT), *(p for p in sys.path if p.endswith("site-packages"))])
    _run(sys.executable, "-B", ROOT / "tests" / "zoo" / "reference.py", expected, PYTHONPATH=path)
    with np.load(output) as ours, np.load(expected) as jax:
        assert {name.removeprefix("/built") for name in ours.files if name.startswith("/built/")} == {*jax.files}
        assert [name for name in jax.files if ours[f"/built{name}"].tobytes() != jax[name].tobytes()] == []
        # An exported artifact is compiled for this machine's CPU, so it rounds otherwise.
        for name in jax.files:
            dtype = np.dtype(re.sub(r"\[.*", "", name.rpartition(":")[2]))
            left, right = (file[at].view(dtype) for file, at in ((ours, f"/portable{name}"), (jax, name)))
            np.testing.assert_allclose(left.astype(complex), right.astype(complex), rtol=1e-4, atol=1e-5, err_msg=name)


SERVE = {
    "action compile --spec FOLDER/zoo.loop.cpu.spec --exported FOLDER/zoo.loop.exported --output x.xla": "",
    "diff BUNDLE BUNDLE": "the same",
    "explain BUNDLE BUNDLE": "made from the same",
    "explain BUNDLE": "chosen",
    "extract BUNDLE --output extracted": "mlp.exported",
    "inspect BUNDLE": "bundle zoo 0: ",
    "inspect FOLDER/zoo.mlp.cpu.batch1.json": "executable of mlp",
    "inspect FOLDER/zoo.mlp.exported": "exported artifact of mlp: ",
    "bench BUNDLE loop --starts 1 --rounds 1 --seconds 0.01": "loop for cpu",
    "inspect BUNDLE --sizes": "zoo: ",
    "run BUNDLE --golden": "from_file",
    "run BUNDLE loop --random": "result",
    "strip BUNDLE --output stripped.aot": "",
    "stub BUNDLE": "class ZooBundle(Bundle):",
    "targets": "h100-sxm",
    "verify BUNDLE": "members, each with the digest that the index says",
}
NEEDS = {
    "action plan zoo.toml": "pydantic",
    "schema": "pydantic",
    "explain BUNDLE zoo.toml": "pydantic",
    "action export --spec FOLDER/zoo.loop.spec --output x --description y": "jax",
    "verify BUNDLE --key key.pem --signature s.json": "cryptography",
}


EXTENSIONS = {
    "report BUNDLE --output report.html": "insight",
    "image BUNDLE --output image": "registry",
    "rehearse --device nothing -- true": "rehearse",
    "serve BUNDLE --port 0 --policy nothing": "serve",
}
"""A command of each extension that has some; two of them end at once: for want of a package, and by a wrong option."""
REFUSED = {"rehearse": "needs the package pydantic", "serve": "argument --policy: invalid choice"}


def _command(python: Path, zoo: Path, folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    words = line.replace("BUNDLE", str(zoo)).replace("FOLDER", str(zoo.parent)).split()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    stagec = python.with_name("stagec")
    return subprocess.run([stagec, *words], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("line", SERVE)
def test_the_wheel_alone_runs_the_commands_for_bundles(python: Path, zoo: Path, tmp_path: Path, line: str) -> None:
    done = _command(python, zoo, tmp_path, line)
    intact = 3  # of a bundle whose signature nobody asked for
    assert (done.returncode, done.stderr) == (intact if line.startswith("verify") else 0, "")
    assert SERVE[line] in done.stdout


@pytest.mark.parametrize("line", NEEDS)
def test_other_commands_name_the_package_that_they_need(python: Path, zoo: Path, tmp_path: Path, line: str) -> None:
    package = NEEDS[line]
    done = _command(python, zoo, tmp_path, line)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"the package {package}, which is not installed" in done.stderr
    version = f"=={importlib.metadata.version('jaxlib')}" if package == "jax" else ""
    assert done.stderr.endswith(f" pip install {package}{version}\n")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("line", EXTENSIONS)
def test_a_command_of_an_extension_that_is_not_there(python: Path, zoo: Path, tmp_path: Path, line: str) -> None:
    done = _command(python, zoo, tmp_path, line)
    what = f"stagec {line.split(maxsplit=1)[0]} needs the extension {EXTENSIONS[line]}, which is not installed"
    how = f"in a clone of stagec, pip install ./compiler/extensions/{EXTENSIONS[line]}"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{what}\n  {how}\n")


def test_each_command_is_above_or_is_for_builds() -> None:
    builds = {"add-jaxlib", "autotune", "baseline", "compare-jit", "describe-device", "emulate", "init", "profile"}
    builds |= {"build", "pull", "push", "rebuild", "reproduce", "sign", "store"}
    listed = {line.split()[0] for line in (*SERVE, *NEEDS, *EXTENSIONS)} - {"action"}
    assert listed | builds == {name for name in COMMANDS if not name.startswith("action ")}


# Last: no other test is for the environment that it leaves.
def test_extensions_add_their_commands(python: Path, zoo: Path, tmp_path: Path) -> None:
    """Each is installed beside the core and those before it, from its folder, as pages say."""
    source = _sources(tmp_path / "source")
    install = (sys.executable, Path(pip.__file__).parent, "--python", python, "install", "--quiet")
    lines = {extension: line for line, extension in EXTENSIONS.items()}
    offers = "in a clone of stagec, pip install ./compiler/extensions/"
    for row in extensions.EXTENSIONS:
        assert (offers + row.name in _command(python, zoo, tmp_path, "--help").stdout) == bool(row.commands)
        _run(*install, source / "extensions" / row.name, PYTHONPATH="")
        assert offers + row.name not in _command(python, zoo, tmp_path, "--help").stdout
        if row.commands:
            done = _command(python, zoo, tmp_path, lines[row.name])
            assert done.returncode == (2 if row.name in REFUSED else 0), done.stderr
            assert REFUSED.get(row.name, "") in done.stderr
    script = "import stagec, numpy as np; print(stagec.jit(lambda x: x * 2, frontend='arrays')(np.ones(2)))"
    assert _run(python, "-c", script, PYTHONPATH="") == "Array([2., 2.], dtype=float32)\n"
