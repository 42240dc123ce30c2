"""Compiling for NVIDIA devices on a machine without one: devices, meshes, equal bytes, and what is refused.

Modules: `backends/gpu/compiler.py`, `backends/gpu/nvidia.py`,
`backends/gpu/descriptions.py`, `pjrt/gpu_calls.py`, `cli/describe_device.py`.
"""

import os
import re
import struct
import tomllib
from pathlib import Path

import pytest

from stagec.backends.gpu import compiler as cuda, container, descriptions
from stagec.core.data import gpu_executables, wire
from stagec.core.messages.errors import StagecError
from stagec.hardware import autotuning, cuda as gpus, gpu_devices
from tests.backends.deviceless import CUSTOM_CALL, OVERLAPPING, compile_again, compile_elsewhere, installed, layer, run
from tests.building import stagec

with_plugin = installed(
    jax_cuda13_pjrt="jax_plugins.xla_cuda13",
    jax_cuda13_plugin="jax_cuda13_plugin",
    nvidia_cuda_nvcc="nvidia.cu13.bin",
    nvidia_nvvm="nvidia.cu13.nvvm",
)

MESH = {"data": 4, "model": 2}


@with_plugin
@pytest.mark.parametrize("name", gpus.devices())
def test_a_function_for_one_device(tmp_path: Path, name: str) -> None:
    made = compile_again(tmp_path, "cuda", name, layer())
    assert made.refused == ("", "", "")
    assert (made.device, made.jax) == (gpus.device(name).name, False)
    assert made.memory is not None
    assert made.memory["argument_size_in_bytes"] == 4 * (256 * 512 + 512 * 512)
    assert made.memory["peak_memory_in_bytes"] >= made.memory["argument_size_in_bytes"]
    parts = {layer_name: (data, text) for layer_name, data, text in cuda.layers(made.executable)}
    binary, kernels = parts["binary"]
    assert "wrapped_tanh" in kernels
    assert "__cublas$" in made.hlo
    # https://docs.nvidia.com/cuda/pdf/ptx_isa.pdf does not say it, `readelf -h` does: bits 8 to 15 of a cubin's flags.
    (flags,) = struct.unpack_from("<I", binary, 48)
    capability = gpus.device(name).compute_capability.rstrip("af").replace(".", "")
    assert flags >> 8 & 0xFF == int(capability)
    assert parts["optimized HLO"][1].startswith("HloModule jit_layer")


@with_plugin
@pytest.mark.parametrize("name", ["a100-80gb", "l40s", "h200", "gb200"])
def test_a_sharded_function_has_a_collective_and_its_part_of_the_arguments(tmp_path: Path, name: str) -> None:
    made = compile_again(tmp_path, "cuda", name, layer(MESH), tuple(MESH.values()), topology="1x1x8")
    assert made.refused == ("", "", "")
    assert "all-reduce" in made.hlo
    assert made.memory is not None
    assert made.memory["argument_size_in_bytes"] == 4 * (64 * 256 + 256 * 512)


@with_plugin
def test_more_devices_than_a_machine_has(tmp_path: Path) -> None:
    mesh = {"data": 32, "model": 8}
    made = compile_again(tmp_path, "cuda", "h200", layer(mesh), (32, 8), topology="1x32x8")
    assert made.refused == ("", "", "")
    assert "all-reduce" in made.hlo
    assert made.memory is not None
    assert made.memory["argument_size_in_bytes"] == 4 * (8 * 64 + 64 * 512)


@with_plugin
def test_devices_differ_in_their_code(tmp_path: Path) -> None:
    made = [compile_again(tmp_path, "cuda", name, layer()) for name in ("a100-80gb", "l4", "h200", "b200")]
    assert [one.refused for one in made] == [("", "", "")] * 4
    assert len({one.sha256 for one in made}) == 4


@with_plugin
@pytest.mark.parametrize(
    ("module", "mesh"),
    [(layer(), ()), (layer(MESH), (4, 2)), (OVERLAPPING, (4, 2))],
    ids=["one", "eight", "overlapping"],
)
def test_another_process_makes_the_same_bytes(tmp_path: Path, module: str, mesh: tuple[int, ...]) -> None:
    env = {"CUDA_HOME": "/nowhere", "PATH": "/nowhere"}
    compile_elsewhere(tmp_path, "cuda", "h200", module, mesh, env=env, topology="1x1x8" if mesh else "1x1x1")


@with_plugin
def test_nothing_of_the_build_machine_is_stored(tmp_path: Path) -> None:
    made = compile_again(tmp_path, "cuda", "l4", layer())
    *_, rest = gpu_executables.parts(made.executable)
    (cpu,) = wire.find(rest, container.FIELDS["cpu_target_machine_options.cpu"])
    assert cpu == b"x86-64-v2"
    stored = b"".join(data for _, data, _ in cuda.layers(made.executable))
    assert os.fsencode(tmp_path) not in stored
    assert b"site-packages" not in stored
    assert b"stagec-" not in stored
    assert b"/tmp" not in stored


_UNCHANGED = """
import sys
from stagec.backends import plugins
from stagec.backends.gpu import compiler as cuda, descriptions, nvidia
from stagec.hardware import catalog, cuda as gpus
cuda.prepare_process(catalog.target("h200"))
from jaxlib.mlir import ir
from stagec.stages import mlir
config = nvidia.target_config(gpus.device("h200"))
options = {"target_config": config, "topology": "1x1x8", "host_target_machine_options": cuda._HOST}
devices = plugins.topology_devices(nvidia.PLUGIN, "", options)
with nvidia.scratch(), mlir.make_context():
    executable = plugins.compile_for(nvidia.PLUGIN, devices, ir.Module.parse(sys.argv[1]), {})
open(sys.argv[2], "wb").write(executable.serialize())
"""


@with_plugin
def test_addresses_that_xla_stores_become_numbers(tmp_path: Path) -> None:
    for name in ("first", "second"):
        done = run(_UNCHANGED, OVERLAPPING, str(tmp_path / name), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    first, second = ((tmp_path / name).read_bytes() for name in ("first", "second"))
    canonical = cuda.canonicalize(first)
    assert canonical == cuda.canonicalize(second)
    assert canonical not in (first, second)
    assert cuda.canonicalize(canonical) == canonical
    program, same_program = ([(name, data) for name, data, _ in cuda.layers(x)][:3] for x in (first, canonical))
    assert program == same_program


_PERMUTE = """
#split = #sdy.sharding<@mesh, [{"d"}, {}]>
module @jit_permute {
  sdy.mesh @mesh = <["d"=8]>
  func.func public @main(%x: tensor<16x16xf32> {sdy.sharding = #split}) -> tensor<16x16xf32> {
    %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"d"}, {}]>] out_shardings=[<@mesh, [{"d"}, {}]>]
        manual_axes={"d"} (%y: tensor<2x16xf32>) {
      %1 = "stablehlo.collective_permute"(%y) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
        source_target_pairs = dense<[[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [6, 7], [7, 0]]> : tensor<8x2xi64>
      } : (tensor<2x16xf32>) -> tensor<2x16xf32>
      sdy.return %1 : tensor<2x16xf32>
    } : (tensor<16x16xf32>) -> tensor<16x16xf32>
    return %0 : tensor<16x16xf32>
  }
}
"""


@with_plugin
def test_pairs_of_source_and_target_have_one_order(tmp_path: Path) -> None:
    """XLA stores them as a hash table has them: four orders in eight runs."""
    built = set()
    for number in range(6):
        done = run(_UNCHANGED, _PERMUTE, str(tmp_path / str(number)), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        built.add(cuda.canonicalize((tmp_path / str(number)).read_bytes()))
    assert len(built) == 1


_CUSOLVER = """
module @jit_factorize {
  func.func public @main(%x: tensor<64x64xf32>) -> (tensor<64x64xf32>, tensor<i32>) {
    %0:2 = stablehlo.custom_call @cusolver_potrf_ffi(%x) {api_version = 4 : i32,
      mhlo.backend_config = {lower = true}, operand_layouts = [dense<[0, 1]> : tensor<2xindex>],
      result_layouts = [dense<[0, 1]> : tensor<2xindex>, dense<> : tensor<0xindex>]
    } : (tensor<64x64xf32>) -> (tensor<64x64xf32>, tensor<i32>)
    return %0#0, %0#1 : tensor<64x64xf32>, tensor<i32>
  }
}
"""


@with_plugin
def test_what_a_library_call_costs_is_not_known(tmp_path: Path) -> None:
    made = compile_again(tmp_path, "cuda", "h200", _CUSOLVER)
    assert made.refused == ("", "", "")
    assert "cusolver_potrf_ffi" in made.hlo
    assert made.cost == {}


_BATCH = """
module @jit_factorize attributes {mhlo.num_partitions = 4 : i32} {
  sdy.mesh @mesh = <["data"=4]>
  func.func public @main(%x: tensor<8x64x64xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}, {}]>})
      -> (tensor<8x64x64xf32>, tensor<8xi32>) {
    %0:2 = stablehlo.custom_call @cusolver_potrf_ffi(%x) {api_version = 4 : i32,
      mhlo.backend_config = {lower = true}, mhlo.frontend_attributes = {num_batch_dims = "1"},
      operand_layouts = [dense<[1, 2, 0]> : tensor<3xindex>],
      result_layouts = [dense<[1, 2, 0]> : tensor<3xindex>, dense<0> : tensor<1xindex>],
      sdy.sharding_rule = #sdy.op_sharding_rule<([i, j, k])->([i, l, m], [i]) {i=8, j=64, k=64, l=64, m=64}, custom>
    } : (tensor<8x64x64xf32>) -> (tensor<8x64x64xf32>, tensor<8xi32>)
    return %0#0, %0#1 : tensor<8x64x64xf32>, tensor<8xi32>
  }
}
"""


@with_plugin
def test_a_batch_of_matrices_is_not_gathered(tmp_path: Path) -> None:
    made = compile_again(tmp_path, "cuda", "h200", _BATCH, (4,), topology="1x1x4")
    assert made.refused == ("", "", "")
    assert "f32[2,64,64]{1,2,0}, s32[2]{0}) custom-call(" in made.hlo
    assert "all-gather" not in made.hlo


@with_plugin
def test_a_custom_call_that_nvidia_devices_do_not_have(tmp_path: Path) -> None:
    what, _, _ = compile_again(tmp_path, "cuda", "h200", CUSTOM_CALL).refused
    assert what.startswith("XLA refuses the module: NOT_FOUND: No FFI handler registered for lapack_spotrf_ffi")


@with_plugin
def test_an_option_that_xla_does_not_know(tmp_path: Path) -> None:
    options = {"xla_gpu_autotune_levle": 0}
    assert compile_again(tmp_path, "cuda", "h200", layer(), compiler_options=options).refused == (
        "jax-cuda13-pjrt has no option xla_gpu_autotune_levle",
        "compiler_options.xla_gpu_autotune_levle",
        "did you mean xla_gpu_autotune_level?",
    )


@with_plugin
def test_a_profile_is_read(tmp_path: Path) -> None:
    options = {
        "fdo_profile": 'costs { name: "all-reduce" cost_us: 100 }',
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_pgle_accuracy_checker": "PGLE_STRICTNESS_LEVEL_ERROR",
    }
    what = compile_again(
        tmp_path, "cuda", "h200", OVERLAPPING, (4, 2), topology="1x1x8", compiler_options=options
    ).refused[0]
    assert what == "XLA refuses the module: INVALID_ARGUMENT: Found 5 missing instructions. Discarding the profile."


# The product of `layer(rows=256, dtype="bf16")`, which XLA splits, and tiles that XLA would not choose without timing.
KERNEL = """{
  tmp_0 = bf16[256,4,128]{2,1,0} parameter(0)
  tmp_1 = bf16[4,128,512]{2,1,0} parameter(1)
  ROOT tmp_2 = f32[4,256,512]{2,1,0} dot(bf16[256,4,128]{2,1,0} tmp_0, bf16[4,128,512]{2,1,0} tmp_1), \
lhs_batch_dims={1}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
}"""
TILES = "block_m: 64 block_n: 32 block_k: 32 num_stages: 3 num_warps: 4 num_ctas: 1"
H200 = "CUDA: 9.0, Cores: 132, GPU clock: 1.98 GHz, Memory bandwidth: 4814 GB/s, L2 cache: 60 MB, DNN version: 9.15.1"


INCOMPLETE = {"xla_gpu_require_complete_aot_autotune_results": False}
"""For files with a result of the product alone: since jaxlib 0.10.2 XLA times the sum of its parts too."""


def results(chosen: str = f"triton {{ {TILES} }}", version: int = 45, hlo: str = KERNEL) -> str:
    """A file as XLA writes it."""
    escaped = hlo.replace("\n", "\\n")
    entry = f'device: "{H200}" hlo: "{escaped}" result {{ {chosen} }} version: {version}'
    return f"version: 3\nresults {{ {entry} }}\n"


_CONVOLUTION = """
module @jit_convolution {
  func.func public @main(%x: tensor<2x16x16x8xf32>, %w: tensor<3x3x8x16xf32>, %a: tensor<32x64xi8>,
      %b: tensor<64x32xi8>) -> (tensor<2x16x16x16xf32>, tensor<32x32xi32>) {
    %0 = stablehlo.convolution(%x, %w) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f],
      window = {pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
      : (tensor<2x16x16x8xf32>, tensor<3x3x8x16xf32>) -> tensor<2x16x16x16xf32>
    %1 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
      : (tensor<32x64xi8>, tensor<64x32xi8>) -> tensor<32x32xi32>
    return %0, %1 : tensor<2x16x16x16xf32>, tensor<32x32xi32>
  }
}
"""


@with_plugin
def test_without_results_libraries_choose_kernels_that_run(tmp_path: Path) -> None:
    """An H100 refused cuDNN's engine of number -1, and XLA's first tile of Triton gave wrong products of i8."""
    few = compile_again(tmp_path, "cuda", "h200", _CONVOLUTION)
    assert few.refused == ("", "", "")
    assert "__cudnn$conv" not in few.hlo  # products, as of each convolution of few taps
    many = _CONVOLUTION.replace("3x3x8x16", "12x12x8x16").replace("[[1, 1], [1, 1]]", "[[5, 6], [5, 6]]")
    made = compile_again(tmp_path, "cuda", "h200", many)
    assert "__cudnn$conv" in made.hlo
    assert '"algo_id":"-1"' not in made.hlo
    assert "__cublas$lt$matmul" in made.hlo
    assert "triton" not in made.hlo
    product = compile_again(tmp_path, "cuda", "h200", layer(dtype="bf16"))
    # With room for what cuBLAS needs for its better kernels.
    assert '"autotune_workspace_size":"4194304"' in product.hlo
    other = {"xla_gpu_enable_triton_gemm": True}
    chosen = compile_again(tmp_path, "cuda", "h200", many, compiler_options=other)
    assert "__triton_nested_gemm_fusion" in chosen.hlo
    refused = compile_again(tmp_path, "cuda", "h200", many, compiler_options={"xla_gpu_autotune_level": 4}).refused
    assert refused == (
        'a convolution would fail when it runs: it asks cuDNN for an engine that there is not ("algo_id":"-1")',
        "compiler_options",
        "write compiler_options = { xla_gpu_autotune_level = 0 } to take cuDNN's first engine",
    )


def _convolved(x: str, kernel: str, result: str, numbers: str, window: str) -> str:
    types = f"tensor<{x}>, tensor<{kernel}>"
    return f"""
func.func public @main(%x: tensor<{x}>, %w: tensor<{kernel}>) -> tensor<{result}> {{
  %0 = stablehlo.convolution(%x, %w) dim_numbers = {numbers}, window = {{{window}}}
    {{batch_group_count = 1 : i64, feature_group_count = 1 : i64}} : ({types}) -> tensor<{result}>
  return %0 : tensor<{result}>
}}
"""


_NHWC = "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"


@with_plugin
@pytest.mark.parametrize(
    ("shapes", "numbers", "window", "padded"),
    [
        (["1x512x512x256xbf16", "3x3x256x256xbf16", "1x512x512x256xbf16"], _NHWC, "pad = [[1, 1], [1, 1]]", 129),
        (["1x1024x1024x128xf32", "3x3x128x128xf32", "1x1024x1024x128xf32"], _NHWC, "pad = [[1, 1], [1, 1]]", 514),
        (
            ["1x32x128x128x128xbf16", "3x3x3x128x128xbf16", "1x32x128x128x128xbf16"],
            "[b, 0, 1, 2, f]x[0, 1, 2, i, o]->[b, 0, 1, 2, f]",
            "pad = [[1, 1], [1, 1], [1, 1]]",
            140,
        ),
        (
            ["64x112x112x128xf32", "64x112x112x128xf32", "3x3x128x128xf32"],
            "[f, 0, 1, b]x[i, 0, 1, o]->[0, 1, b, f]",
            "pad = [[1, 1], [1, 1]]",
            406,
        ),
        (["64x224x224x3xf32", "16x16x3x768xf32", "64x14x14x768xf32"], _NHWC, "stride = [16, 16]", 0),
    ],
    ids=["image", "f32", "volume", "gradient", "patches"],
)
def test_products_in_place_of_a_convolution_take_little_memory(
    tmp_path: Path, shapes: list[str], numbers: str, window: str, padded: int
) -> None:
    """In MiB, beside the padded input: 256 of slices, and the products of a part of them."""
    made = compile_again(tmp_path, "cuda", "h200", _convolved(*shapes, numbers, window))
    assert made.refused == ("", "", "")
    assert "__cudnn$conv" not in made.hlo
    assert made.memory is not None
    assert made.memory["temp_size_in_bytes"] / 2**20 <= padded + 256 + 64


@with_plugin
@pytest.mark.parametrize(("batch", "slices"), [(32, 110), (128, 256)])
def test_neither_slices_nor_zeros_are_kept_for_the_gradients(tmp_path: Path, batch: int, slices: int) -> None:
    """Four layers and their gradients: of slices in one part, and in several, whose products replace zeros."""
    image, weights = f"tensor<{batch}x56x56x64xbf16>", "tensor<3x3x64x64xbf16>"
    gradient = "[f, 0, 1, b]x[i, 0, 1, o]->[0, 1, b, f]"

    def convolved(left: str, right: str, result: str, numbers: str = _NHWC) -> str:
        groups = "{batch_group_count = 1 : i64, feature_group_count = 1 : i64}"
        types = f"({image}, {image if result == weights else weights}) -> {result}"
        window = f"window = {{pad = [[1, 1], [1, 1]]}} {groups} : {types}"
        return f"stablehlo.convolution({left}, {right}) dim_numbers = {numbers}, {window}"

    lines = [f"%zero = stablehlo.constant dense<0.0> : {image}"]
    for i in range(4):
        lines.append(f"%c{i} = {convolved(f'%y{i}', '%w', image)}")
        lines.append(f"%y{i + 1} = stablehlo.maximum %c{i}, %zero : {image}")
    lines.append(f"%d4 = stablehlo.tanh %y4 : {image}")
    for i in reversed(range(4)):
        lines.append(f"%g{i} = {convolved(f'%y{i}', f'%d{i + 1}', weights, gradient)}")
        lines.append(f"%e{i} = {convolved(f'%d{i + 1}', '%w', image)}")
        lines.append(f"%d{i} = stablehlo.multiply %e{i}, %y{i} : {image}")
    body, results = "\n".join(lines), ", ".join([weights] * 4)
    module = f"""
func.func public @main(%y0: {image}, %w: {weights}) -> ({results}) {{
  {body}
  return %g0, %g1, %g2, %g3 : {results}
}}
"""
    made = compile_again(tmp_path, "cuda", "h200", module)
    assert made.refused == ("", "", "")
    assert made.memory is not None
    array = batch * 56 * 56 * 64 * 2
    assert made.memory["temp_size_in_bytes"] <= 7 * array + (slices + 64 << 20)


@with_plugin
def test_results_of_autotuning_choose_the_tiles_of_a_kernel(tmp_path: Path) -> None:
    module = layer(rows=256, dtype="bf16")
    timed = compile_again(tmp_path, "cuda", "h200", module, autotuning=results(), compiler_options=INCOMPLETE)
    assert timed.refused == ("", "", "")
    assert '"num_warps":"4","output_tiles":[{"sizes":["1","64","32"]}]' in timed.hlo
    default = compile_again(tmp_path, "cuda", "h200", module)
    assert "__cublas$lt$matmul" in default.hlo
    code = [next(data for name, data, _ in cuda.layers(one.executable) if name == "binary") for one in (timed, default)]
    assert code[0] != code[1]
    empty = compile_again(tmp_path, "cuda", "h200", module, autotuning="# none yet\n")
    assert empty.executable == default.executable


@with_plugin
def test_an_executable_of_results_has_the_same_bytes_elsewhere_and_no_path(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    made = [
        compile_again(out, "cuda", "h200", layer(dtype="bf16"), autotuning=results(), compiler_options=INCOMPLETE)
        for out in (tmp_path, tmp_path / "there")
    ]
    assert made[0].executable == made[1].executable
    assert b"/tmp" not in b"".join(data for _, data, _ in cuda.layers(made[0].executable))


@with_plugin
def test_a_kernel_that_was_not_timed(tmp_path: Path) -> None:
    module, given = layer(rows=512, dtype="bf16"), results()
    what, key, write = compile_again(tmp_path, "cuda", "h200", module, autotuning=given).refused
    assert what in (
        "it has no result for %gemm_fusion_dot = f32[4,512,512]{2,1,0} fusion",
        "it has no result for %loop_reduce_fusion = bf16[512,512]{1,0} fusion",
    )
    assert (key, write) == (
        "autotuning",
        f"{autotuning.REFRESH}\n"
        "or let a library choose without timing: compiler_options = "
        "{ xla_gpu_require_complete_aot_autotune_results = false, xla_gpu_enable_triton_gemm = false }",
    )
    made = compile_again(tmp_path, "cuda", "h200", module, autotuning=given, compiler_options=INCOMPLETE)
    assert made.refused == ("", "", "")


@with_plugin
def test_a_convolution_that_was_not_timed(tmp_path: Path) -> None:
    """With what the error says to write, it has an engine that cuDNN runs."""
    what, _, write = compile_again(tmp_path, "cuda", "h200", _CONVOLUTION, autotuning=results()).refused
    assert re.fullmatch(r"it has no result for %cudnn-conv\S* = \(f32\[2,16,16,16\]\S*, u8\[0\]\S*\) custom-call", what)
    table = write.partition("without timing: ")[2]
    options = tomllib.loads(table)["compiler_options"]
    made = compile_again(tmp_path, "cuda", "h200", _CONVOLUTION, autotuning=results(), compiler_options=options)
    assert made.refused == ("", "", "")
    assert "__cudnn$conv" in made.hlo
    fewer = options | {"xla_gpu_autotune_level": 4}
    made = compile_again(tmp_path, "cuda", "h200", _CONVOLUTION, autotuning=results(), compiler_options=fewer)
    assert made.refused[0].startswith("a convolution would fail when it runs: ")


@with_plugin
@pytest.mark.parametrize(
    ("given", "what"),
    [
        (results(version=41), "results[0].version: timed by an XLA of version 41; this one is 45"),
        (results().replace("Cores: 132", "Cores: 78"), "results[0].device: timed on CUDA: 9.0, Cores: 78, "),
        # These end XLA's process.
        (results(f"triton {{ {TILES} }}".replace("num_warps: 4", "num_warps: 3")), "results[0]: num_warps is 3, "),
        (results(f"triton {{ {TILES} }}".replace("num_ctas: 1", "num_ctas: 5")), "results[0]: num_ctas is 5, "),
    ],
    ids=["version", "device", "warps", "ctas"],
)
def test_results_that_xla_would_pass_over_or_end_with(tmp_path: Path, given: str, what: str) -> None:
    found, key, write = compile_again(tmp_path, "cuda", "h200", layer(dtype="bf16"), autotuning=given).refused
    assert found.startswith(what)
    assert (key, write) == ("autotuning", autotuning.REFRESH)


@with_plugin
def test_what_is_wrong_with_a_result_is_told_by_xla(tmp_path: Path) -> None:
    given = results("triton { " + TILES.replace("block_m: 64", "block_m: 4096") + " }")
    module = layer(dtype="bf16")
    made = compile_again(tmp_path, "cuda", "h200", module, autotuning=given, compiler_options=INCOMPLETE)
    what, _, _ = made.refused
    assert what.startswith("XLA refuses the module: INTERNAL: Couldn't find output tile sizes")


_TWICE = """
import dataclasses, sys
from stagec.backends import compilation
from stagec.backends.gpu import compiler as cuda
from stagec.hardware import catalog
target = catalog.target("h200")
cuda.prepare_process(target)
from jaxlib.mlir import ir
from stagec.stages import mlir
with mlir.make_context():
    module = ir.Module.parse(sys.argv[1])
    given = dataclasses.replace(target, autotuning_results=sys.argv[2], compiler_options=INCOMPLETE)
    cuda.compile_module(module, given, ())
    try:
        cuda.compile_module(module, target, ())
    except compilation.CannotCompile as error:
        print(error)
"""


@with_plugin
def test_a_process_has_the_results_of_one_target(tmp_path: Path) -> None:
    done = run(_TWICE.replace("INCOMPLETE", repr(INCOMPLETE)), layer(dtype="bf16"), results(), cwd=tmp_path)
    kept = "this process has compiled with other results of autotuning, which XLA keeps\n"
    assert (done.returncode, done.stdout) == (0, kept), done.stderr


@with_plugin
def test_a_mesh_of_another_size_than_the_topology(tmp_path: Path) -> None:
    assert compile_again(tmp_path, "cuda", "h200", layer(MESH), (4, 2), topology="1x1x4").refused == (
        "the function's mesh has 8 devices, topology 1x1x4 has 4",
        "topology",
        "write a topology of 8 devices, or a mesh of 4",
    )


_DESCRIBE = """
import sys
from stagec.backends import plugins
from stagec.backends.gpu import compiler as cuda, descriptions, nvidia
from stagec.hardware import catalog, cuda as gpus
cuda.prepare_process(catalog.target("h200"))
config = nvidia.target_config(gpus.device(sys.argv[1]))
plugins.load(nvidia.PLUGIN)
from jaxlib import _jax
topology = _jax.get_default_c_api_topology("cuda", "", {"target_config": config, "topology": "1x1x1"})
sys.stdout.write(descriptions.as_toml(descriptions.properties(topology.target_config)))
"""


@with_plugin
@pytest.mark.parametrize("name", gpus.devices())
def test_what_xla_says_of_a_device_is_read_back(tmp_path: Path, name: str) -> None:
    done = run(_DESCRIBE, name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert gpu_devices.read("cuda", tomllib.loads(done.stdout)) == gpus.device(name)


@with_plugin
def test_there_is_no_device_to_describe_here(tmp_path: Path) -> None:
    done = stagec("describe-device", "--output", tmp_path / "device.toml", env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    what, write = done.stderr.splitlines()[-2:]
    assert what.startswith("CUDA finds no device here: ")
    assert write == "  run this on a machine with an NVIDIA device and its driver"
    assert list(tmp_path.iterdir()) == []


REPORTED = """\
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 65536
  threads_per_core_limit: 1024
  core_count: 40
  fpus_per_core: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 320064000000
  l2_cache_size: 4194304
  clock_rate_ghz: 1.59
  device_memory_size: 15642329088
  shared_memory_per_block_optin: 65536
  cuda_compute_capability {
    major: 7
    minor: 5
  }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  name: "Tesla T4"
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  pcie_bandwidth: 17179869184
}
platform_name: "CUDA"
dnn_version_info {
  major: 9
  minor: 12
}
device_description_str: "Tesla T4"
"""


def test_what_the_driver_does_not_report_is_left_to_be_written() -> None:
    text = descriptions.as_toml(descriptions.properties(REPORTED))
    assert text.endswith(
        "\n# bf16_flops = the peak of dense bfloat16 operations a second: see the device's data sheet.\n"
    )
    with pytest.raises(StagecError) as caught:
        gpu_devices.read("cuda", tomllib.loads(text))
    assert [problem.key for problem in caught.value.problems] == ["bf16_flops"]
    device = gpu_devices.read("cuda", tomllib.loads(f"{text}bf16_flops = 65e12\n"))
    assert (device.name, device.compute_capability, device.active_links) == ("Tesla T4", "7.5", 0)
    assert (device.core_count, device.clock_rate_ghz) == (40, 1.59)
