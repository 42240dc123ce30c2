"""The binary interface of executables."""

import json
from pathlib import Path
from typing import Any

import pytest

from stagec.bundle.description import Description
from stagec.costs import hlo
from stagec.stages import mlir


def abi(zoo: Path, name: str) -> Any:
    return json.loads((zoo.parent / f"zoo.{name}.json").read_text())["abi"]


def test_the_parameters_and_results_of_one_device(zoo: Path) -> None:
    whole = {"sharding": None, "tiles": []}
    assert abi(zoo, "mlp.cpu.batch4") == {
        "parameters": [
            {
                "path": path,
                "dtype": "f32",
                "shape": shape,
                "shard_shape": shape,
                "minor_to_major": list(range(len(shape)))[::-1],
                **whole,
                "donated": False,
            }
            for path, shape in (("args[0]['b']", [4]), ("args[0]['w']", [16, 4]), ("args[1]", [4, 16]))
        ],
        "results": [
            {
                "path": "result",
                "dtype": "f32",
                "shape": [4, 4],
                "shard_shape": [4, 4],
                "minor_to_major": [1, 0],
                **whole,
            }
        ],
    }


def test_arguments_that_the_program_drops_are_no_parameters(zoo: Path) -> None:
    assert [one["path"] for one in abi(zoo, "named-square.cpu")["parameters"]] == ["args[0]", "kwargs['shift']"]


def test_donated_parameters(zoo: Path) -> None:
    assert {one["path"]: one["donated"] for one in abi(zoo, "update.cpu")["parameters"]} == {
        "args[0]['x']": True,
        "args[0]['y'][0]": True,
        "args[1]": False,
    }


def test_shards(zoo: Path) -> None:
    parameters, results = abi(zoo, "sharded.cpu.batch8").values()
    found = {one["path"]: (one["shape"], one["shard_shape"], one["sharding"]) for one in [*parameters, *results]}
    assert found == {
        "args[0]['b']": ([4], [2], [["model"]]),
        "args[0]['w']": ([6, 4], [6, 2], [[], ["model"]]),
        "args[1]": ([8, 6], [4, 6], [["data"], []]),
        "result['total']": ([4, 6], [4, 6], None),
        "result['y']": ([8, 4], [4, 4], [["data"], []]),
    }


def test_types_of_the_text() -> None:
    """As XLA:TPU writes them: tiles, numbered elements, a memory space; one result is not a tuple."""
    tiled = "f32[8,256]{1,0:T(8,128)}"
    text = (
        f"HloModule f, entry_computation_layout={{({tiled}, /*index=1*/bf16[8]{{0:T(256)(128)(2,1)S(1)}})->{tiled}}}\n"
    )
    assert hlo.entry_types(text) == ([tiled, "bf16[8]{0:T(256)(128)(2,1)S(1)}"], [tiled])
    with pytest.raises(ValueError, match="the HLO does not say how its parameters lie in memory"):
        hlo.entry_types("HloModule f\n")


def test_an_abi_of_other_arguments(zoo: Path) -> None:
    text = json.loads((zoo.parent / "zoo.loop.cpu.json").read_text())
    text["abi"]["results"].pop()
    with pytest.raises(ValueError, match="abi: it has other numbers of parameters and results than kept_var_idx"):
        Description.from_json(json.dumps(text))


def test_modules_are_static_and_hold_no_location(zoo: Path) -> None:
    artifact = (zoo.parent / "zoo.effectful.cpu.n3.stablehlo.mlirbc").read_bytes()
    assert artifact.startswith(b"ML\xefR")
    with mlir.make_context() as context:
        module = mlir.read_artifact(context, artifact)
        text = module.operation.get_asm(enable_debug_info=True)
    assert "tensor<3xf32>" in text
    assert "tensor<?" not in text
    assert {part.partition(")")[0] for part in text.split("loc(")[1:]} == {"unknown", "#loc"}


def test_shardings_are_in_the_module_as_xla_gets_them(zoo: Path) -> None:
    artifact = (zoo.parent / "zoo.sharded.cpu.batch8.stablehlo.mlirbc").read_bytes()
    with mlir.make_context() as context:
        module = mlir.read_artifact(context, artifact)
        assert mlir.mesh(module) == {"data": 2, "model": 2}
        assert 'sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>' in str(module)
