"""Arguments described by files: safetensors headers, flax's msgpack, orbax's metadata; and files that are none.

Modules: `frontends/common/msgpack_headers.py`.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from stagec.core.messages.errors import StagecError
from stagec.frontends.common import checkpoints, msgpack_headers
from tests.building import COMPILER, action_environment, stagec
from tests.frontends.workspace import export, spec


class Net(nn.Module):
    """A model whose parameters are saved."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2, name="output")(nn.relu(nn.Dense(4, param_dtype=jnp.bfloat16, name="hidden")(x)))


def state() -> dict[str, Any]:
    """A train state: parameters, an optimizer's, numbers of Python and of numpy."""
    params = Net().init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    return {
        "params": params,
        "opt_state": optax.adam(1e-3).init(params),
        "step": 3,
        "rate": 0.5,
        "scale": np.float32(2),
        "many": list(jnp.arange(3, dtype=jnp.int8)),
        "empty": None,
    }


PARAMS = {
    "hidden": {"bias": "bf16[4]", "kernel": "bf16[3,4]"},
    "output": {"bias": "f32[2]", "kernel": "f32[4,2]"},
}
MODEL = """\
import jax


def double(x, **others):
    return 2 * x


def predict(params, x):
    h = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return h @ params["output"]["kernel"] + params["output"]["bias"]
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("workspace")
    folder = root / "pkg"
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    saved = state()
    flat = {"/".join(path): value for path, value in flax.traverse_util.flatten_dict(saved["params"]).items()}
    # safetensors has no way to write ml_dtypes' bfloat16 with numpy: f16 here.
    halves = {
        name: np.asarray(value, np.float16 if value.dtype == jnp.bfloat16 else value.dtype)
        for name, value in flat.items()
    }
    safetensors.numpy.save_file(halves, folder / "params.safetensors")
    (folder / "state.msgpack").write_bytes(flax.serialization.to_bytes(saved))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "standard", saved)
    with ocp.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
        checkpointer.save(folder / "zarr", saved)
    with ocp.CheckpointManager(folder / "steps") as manager:
        for step in (8, 9):
            manager.save(step, args=ocp.args.StandardSave({"params": saved["params"]}))
    return root


def avals(workspace: Path, leaf: str, **changes: Any) -> Any:
    return checkpoints.avals(spec(**changes), leaf, "args[0]", [str(workspace)])


def test_safetensors(workspace: Path) -> None:
    halves = {name: aval.replace("bf16", "f16") for name, aval in PARAMS["hidden"].items()}
    assert avals(workspace, "safetensors:params.safetensors?sep=/") == {**PARAMS, "hidden": halves}
    assert avals(workspace, "safetensors:params.safetensors")["output/kernel"] == "f32[4,2]"


@pytest.mark.parametrize("leaf", ["msgpack:state.msgpack", "orbax:standard", "orbax:zarr"])
def test_a_checkpoint_has_the_avals_of_what_was_saved(leaf: str, workspace: Path) -> None:
    """Compared with what the library itself gives back, whose arrays JAX then takes."""
    folder = workspace / "pkg"
    if leaf.startswith("msgpack"):
        restored = flax.serialization.msgpack_restore((folder / "state.msgpack").read_bytes())
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(folder / leaf.partition(":")[2])
    for enable_x64 in (False, True):
        with jax.enable_x64(enable_x64):
            expected = jax.tree.map(lambda value: str(jax.typeof(value)), restored)
            assert avals(workspace, leaf, enable_x64=enable_x64) == jax.tree.map(bracketed, expected)
    assert avals(workspace, f"{leaf}?at=params") == PARAMS
    assert avals(workspace, f"{leaf}?at=params.output.kernel") == "f32[4,2]"
    found = avals(workspace, leaf)
    assert (found["step"], found["rate"], found["empty"]) == ("~i32[]", "~f32[]", None)
    assert avals(workspace, leaf, enable_x64=True)["step"] == "~i64[]"


def bracketed(text: str) -> str:
    """JAX's short text of an aval as stagec writes it."""
    names = {"int8": "i8", "int32": "i32", "int64": "i64", "float32": "f32", "float64": "f64", "bfloat16": "bf16"}
    dtype, _, rest = text.removeprefix("~").partition("[")
    return f"{'~' * text.startswith('~')}{names.get(dtype, dtype)}[{rest}"


def test_a_step_of_a_checkpoint_manager(workspace: Path) -> None:
    assert avals(workspace, "orbax:steps/9/default?at=params") == PARAMS


def test_no_weights_are_read(tmp_path: Path) -> None:
    """Files whose arrays are holes: reading them would map 4 GiB."""
    data = flax.serialization.to_bytes({"w": np.zeros((0, 3), np.float32), "v": np.float32(1)})
    path = tmp_path / "huge.msgpack"
    size = 4_000_000_000
    shape = msgpack.packb([1_000_000_000]) + msgpack.packb("float32")
    inner = b"\x93" + shape + b"\xc6" + size.to_bytes(4, "big")
    with path.open("wb") as file:
        file.write(b"\x81" + msgpack.packb("w") + b"\xc9" + (len(inner) + size).to_bytes(4, "big") + b"\x01" + inner)
        file.truncate(file.tell() + size)
    try:
        assert msgpack_headers.read(path) == {"w": msgpack_headers.Array((1_000_000_000,), "float32")}
    finally:
        path.unlink()
    (tmp_path / "small.msgpack").write_bytes(data)
    assert msgpack_headers.read(tmp_path / "small.msgpack") == {
        "w": msgpack_headers.Array((0, 3), "float32"),
        "v": msgpack_headers.Array((), "float32"),
    }


def test_an_array_in_chunks_and_complex_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 16)
    value = {"w": np.ones((3, 5), jnp.bfloat16), "c": 1 + 2j, "flag": True}
    (tmp_path / "a.msgpack").write_bytes(flax.serialization.msgpack_serialize(value))
    found = checkpoints.avals(spec(manifest="m.toml"), "msgpack:a.msgpack", "args[0]", [str(tmp_path)])
    assert found == {"w": "bf16[3,5]", "c": "c64[]", "flag": "bool[]"}


@pytest.mark.parametrize(
    ("leaf", "dtype"),
    [
        ("safetensors:params.safetensors?sep=/", "f16"),
        ("msgpack:state.msgpack?at=params", "bf16"),
        ("orbax:steps/9/default?at=params", "bf16"),
    ],
)
def test_a_function_is_exported(leaf: str, dtype: str, workspace: Path) -> None:
    function = spec(entry="pkg.model:predict", args=[leaf, "f32[batch,3]"])
    status, stderr, output = export(workspace, function)
    assert (status, stderr) == (0, "")
    artifact = jax.export.deserialize(bytearray(output.read_bytes()))
    assert str(artifact.in_avals[1].dtype) == {"f16": "float16", "bf16": "bfloat16"}[dtype]
    assert [aval.shape for aval in artifact.in_avals[:4]] == [(4,), (3, 4), (2,), (4, 2)]


REFUSED: Mapping[str, tuple[str, str]] = {
    "safetensors:none.safetensors": (
        "no file pkg/none.safetensors",
        "name the file in data, relative to the manifest's folder",
    ),
    "msgpack:none.msgpack": (
        "no file pkg/none.msgpack",
        "name the file in data, relative to the manifest's folder",
    ),
    "orbax:none": (
        "no folder pkg/none",
        'name its files in data, as in data = glob(["none/**"]), relative to the manifest\'s folder',
    ),
    "orbax:state.msgpack": (
        "no folder pkg/state.msgpack",
        'name its files in data, as in data = glob(["state.msgpack/**"]), relative to the manifest\'s folder',
    ),
    "safetensors:text.safetensors": (
        "pkg/text.safetensors is not a safetensors file that stagec can read: the header runs over the end of the file",
        "",
    ),
    "msgpack:text.safetensors": (
        "pkg/text.safetensors is not a checkpoint of flax.serialization: something follows after byte 1",
        "write it with flax.serialization.to_bytes or msgpack_serialize",
    ),
    "msgpack:empty.msgpack": (
        "pkg/empty.msgpack is not a checkpoint of flax.serialization: it is empty",
        "write it with flax.serialization.to_bytes or msgpack_serialize",
    ),
    "msgpack:cut.msgpack": (
        "pkg/cut.msgpack is not a checkpoint of flax.serialization: it ends at byte 400, in the middle of an array",
        "write it with flax.serialization.to_bytes or msgpack_serialize",
    ),
    "msgpack:other.msgpack": (
        "pkg/other.msgpack is not a checkpoint of flax.serialization: byte 4 is an extension of type 9, which flax "
        "does not write",
        "write it with flax.serialization.to_bytes or msgpack_serialize",
    ),
    "msgpack:named.msgpack": (
        "pkg/named.msgpack: name is a str, which is not an array of JAX's",
        'name a part without it with ?at=, or write avals = "package.module:function" that returns the arguments',
    ),
    "msgpack:state.msgpack?at=params.outpt": (
        "pkg/state.msgpack: there is no 'outpt' at params, only 'hidden', 'output'",
        'did you mean "output"?',
    ),
    "orbax:standard?at=many.3": (
        "pkg/standard: there is no '3' at many, only '0', '1', '2'",
        "write one of 0, 1, 2",
    ),
    "orbax:steps": (
        "pkg/steps is not a checkpoint of orbax: it has no file _METADATA",
        'write for example "orbax:steps/9/default"',
    ),
    "orbax:nothing": (
        "pkg/nothing is not a checkpoint of orbax: it has no file _METADATA",
        "name the folder that has the file _METADATA",
    ),
}


@pytest.fixture(scope="module")
def damaged(workspace: Path) -> Path:
    folder = workspace / "pkg"
    (folder / "text.safetensors").write_text("this is not such a file")
    (folder / "empty.msgpack").write_bytes(b"")
    (folder / "cut.msgpack").write_bytes((folder / "state.msgpack").read_bytes()[:400])
    (folder / "other.msgpack").write_bytes(msgpack.packb({"w": msgpack.ExtType(9, b"x" * 16)}))
    (folder / "named.msgpack").write_bytes(flax.serialization.msgpack_serialize({"w": np.ones(2), "name": "a model"}))
    (folder / "nothing").mkdir()
    (folder / "nothing" / "d").write_text("")
    shutil.copytree(folder / "standard", folder / "broken")
    (folder / "broken" / "_METADATA").write_text("{}")
    return workspace


@pytest.mark.parametrize("leaf", REFUSED)
def test_a_file_that_does_not_say_it(leaf: str, damaged: Path) -> None:
    with pytest.raises(StagecError) as caught:
        avals(damaged, leaf)
    what, write = REFUSED[leaf]
    assert str(caught.value) == f"pkg/m.toml: functions.f.args[0]: {what}" + (f"\n  {write}" if write else "")


def test_a_damaged_checkpoint_of_orbax(damaged: Path) -> None:
    with pytest.raises(StagecError, match=r"args\[0\]: pkg/broken is not a checkpoint of orbax: "):
        avals(damaged, "orbax:broken")


def test_every_file_cut_anywhere_is_refused(workspace: Path, tmp_path: Path) -> None:
    data = (workspace / "pkg" / "state.msgpack").read_bytes()
    path = tmp_path / "cut.msgpack"
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"\w"):
            msgpack_headers.read(path)


def test_all_files_are_told_together(damaged: Path) -> None:
    function = spec(args=["orbax:none", "msgpack:empty.msgpack"], kwargs={"y": "safetensors:none.safetensors"})
    status, stderr, _ = export(damaged, function)
    leaves = ("orbax:none", "msgpack:empty.msgpack", "safetensors:none.safetensors")
    keys = ("args[0]", "args[1]", "kwargs.y")
    told = [(key, *REFUSED[leaf]) for key, leaf in zip(keys, leaves, strict=True)]
    assert status == 2
    assert stderr == "".join(f"pkg/m.toml: functions.f.{key}: {what}\n  {write}\n" for key, what, write in told)


@pytest.mark.parametrize(("leaf", "package"), [("msgpack:state.msgpack", "msgpack"), ("orbax:standard", "orbax")])
def test_a_library_that_is_not_in_the_lock(leaf: str, package: str, workspace: Path, tmp_path: Path) -> None:
    """The environment of the tests, without one package."""
    (tmp_path / "site-packages").mkdir()
    for folder in [entry for entry in action_environment()["PYTHONPATH"].split(":") if entry.endswith("site-packages")]:
        for entry in Path(folder).iterdir():
            if entry.name != package:
                (tmp_path / "site-packages" / entry.name).symlink_to(entry)
    (workspace / "f.spec").write_text(json.dumps({**vars(spec(args=[leaf]))}))
    done = stagec(
        *("action", "export", "--spec", "f.spec", "--output", "out/f.exported", "--import-root", "."),
        cwd=workspace,
        env={"PYTHONPATH": f"{tmp_path / 'site-packages'}:{COMPILER}"},
    )
    name = {"msgpack": "msgpack", "orbax": "orbax-checkpoint"}[package]
    assert (done.returncode, done.stderr) == (
        2,
        f"pkg/m.toml: functions.f.args[0]: pkg/{leaf.partition(':')[2]} is read with {name}, which cannot be imported: "
        f"No module named '{package}'\n"
        f"  add {name} to the lock of the Python environment\n",
    )


def test_a_tree_that_does_not_fit_the_function(workspace: Path) -> None:
    function = spec(entry="pkg.model:predict", args=["msgpack:state.msgpack", "f32[8,3]"])
    status, stderr, _ = export(workspace, function)
    first, *_, told, write = stderr.splitlines()
    assert status == 2
    assert first == "pkg/m.toml: functions.f: staging pkg.model:predict raised KeyError"
    assert "  KeyError: 'hidden'\n" in stderr
    assert told == (
        "pkg/m.toml: functions.f.args[0]: msgpack:state.msgpack gave it many.0 int8[], many.1 int8[], many.2 int8[], "
        "opt_state.0.count int32[], opt_state.0.mu.hidden.bias bfloat16[4], "
        "opt_state.0.mu.hidden.kernel bfloat16[3,4], opt_state.0.mu.output.bias float32[2], "
        "opt_state.0.mu.output.kernel float32[4,2], and 11 more"
    )
    assert write == '  if the function takes another tree, write avals = "package.module:function" that returns it'
