"""The manifest's format: one pydantic model for each table.

The models are the border: they accept exactly what a TOML file may say, and the JSON Schema for editors is generated
from them, so every field has a description and an example.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
)

from stagec.core.builds import naming
from stagec.core.builds.frontends import FRONTENDS
from stagec.manifest.cpu import CpuTarget
from stagec.manifest.environment import ENVIRONMENT_SCHEMA, read_environment
from stagec.manifest.gpu import CudaTarget, RocmTarget
from stagec.manifest.tables import NAME, RELEASE, Jaxlib, Table
from stagec.manifest.tpu import TpuTarget
from stagec.manifest.values import (
    AMOUNT_SCHEMA,
    COLLECTIVES_SCHEMA,
    SHARDINGS_REFERENCE,
    STATIC_SCHEMA,
    TREE_REFERENCE,
    Static,
    file_pattern,
    read_args,
    read_bytes,
    read_check,
    read_collectives,
    read_constraint,
    read_count,
    read_distinct,
    read_fill,
    read_seconds,
    read_shardings,
    read_sizes,
    read_static,
    read_tolerance,
    read_tree,
    read_weights,
)

IDENTIFIER = r"^[A-Za-z_][A-Za-z0-9_]*$"
"""Names of symbolic dimensions and of Python parameters."""
ENTRY = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"
"""A Python object: `package.module:attribute`."""
_ENDINGS = "|".join(ending.removeprefix(".") for frontend in FRONTENDS for ending in frontend.endings)
MODULE_OR_ENTRY = rf"({ENTRY})|({file_pattern(f'({_ENDINGS})')})"
"""A Python object, or a file of another frontend."""
VERSION = r"^[A-Za-z0-9][A-Za-z0-9.+_-]*$"
"""A version that can be part of a file name."""

ARGUMENT = r"^([A-Za-z_][A-Za-z0-9_]*|args\[(0|[1-9][0-9]*)\])$"
"""An argument: the name of a Python parameter, or its position."""
WEIGHTS, INPUTS = map(file_pattern, ("safetensors", "npz"))
"""Files."""

Name: TypeAlias = Annotated[str, StringConstraints(pattern=NAME)]
Identifier: TypeAlias = Annotated[str, StringConstraints(pattern=IDENTIFIER)]
TENSOR_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_./-]{0,199}$"
TensorName: TypeAlias = Annotated[str, StringConstraints(pattern=TENSOR_NAME)]
Entry: TypeAlias = Annotated[str, StringConstraints(pattern=ENTRY)]
ModuleOrEntry: TypeAlias = Annotated[str, StringConstraints(pattern=MODULE_OR_ENTRY)]
FINGERPRINT = "^[0-9a-f]{16}$"
Fingerprint: TypeAlias = Annotated[str, StringConstraints(pattern=FINGERPRINT)]
Platform: TypeAlias = Literal["cpu", "cuda", "rocm", "tpu"]
Precision: TypeAlias = Literal[
    "default",
    "high",
    "highest",
    "bfloat16",
    "tensorfloat32",
    "float32",
    "ANY_F8_ANY_F8_F32",
    "ANY_F8_ANY_F8_F32_FAST_ACCUM",
    "ANY_F8_ANY_F8_ANY",
    "ANY_F8_ANY_F8_ANY_FAST_ACCUM",
    "F16_F16_F16",
    "F16_F16_F32",
    "BF16_BF16_BF16",
    "BF16_BF16_F32",
    "BF16_BF16_F32_X3",
    "BF16_BF16_F32_X6",
    "BF16_BF16_F32_X9",
    "TF32_TF32_F32",
    "TF32_TF32_F32_X3",
    "F32_F32_F32",
    "F64_F64_F64",
]

Bytes: TypeAlias = Annotated[int | None, PlainValidator(read_bytes), WithJsonSchema(AMOUNT_SCHEMA)]


Variables: TypeAlias = Annotated[
    Mapping[str, str], PlainValidator(read_environment), WithJsonSchema(ENVIRONMENT_SCHEMA)
]


class Tracing(Table):
    """How functions are traced: [manifest] says it for all, a function for itself. None: not said."""

    enable_x64: bool | None = Field(
        None,
        description="Trace with 64-bit types, as with JAX's jax_enable_x64. Otherwise JAX makes them 32-bit types. "
        "A function takes it from [manifest] unless it says otherwise.",
        examples=[True],
    )
    matmul_precision: Precision | None = Field(
        None,
        description="Precision of matrix products and convolutions that the function leaves open, by a name of "
        "JAX's jax_default_matmul_precision. A function takes it from [manifest] unless it says otherwise.",
        examples=["highest"],
    )
    prng_impl: Literal["threefry2x32", "rbg", "unsafe_rbg"] | None = Field(
        None,
        description="Implementation of the PRNG keys that the function makes without naming one, by a name of JAX's "
        "jax_default_prng_impl. Default: JAX's own. A function takes it from [manifest] unless it says otherwise.",
        examples=["rbg"],
    )
    environment: Variables = Field(
        {},
        description="Environment variables that libraries see while the function is traced. They are set before its "
        "module is imported. A function has those of [manifest] too; where both name one, the function's value counts.",
        examples=[{"EQX_ON_ERROR": "nan", "KERAS_BACKEND": "jax"}],
    )
    host_callbacks: Literal["refuse", "drop"] | None = Field(
        None,
        description='What happens to calls back into Python: "refuse" fails the build, the default. "drop" builds the '
        "function without those that have no results, such as jax.debug.print and jax.debug.callback, as if they were "
        "not in the source. A function takes it from [manifest] unless it says otherwise.",
        examples=["drop"],
    )


JaxCache: TypeAlias = Annotated[
    bool | None,
    Field(
        description="Build entries of JAX's persistent compilation cache, the folder `<manifest>.jax_cache`: for each "
        "target and bucket, what a program compiles that calls the function under jax.jit. It is for functions that "
        "JAX traces. A function takes it from [manifest] unless it says otherwise.",
        examples=[True],
    ),
]


class Header(Tracing):
    """What is built: its name, its version, and what holds for all functions."""

    name: Name = Field(description="Name of the bundle, and first part of every artifact's name.", examples=["digits"])
    version: Annotated[str, StringConstraints(pattern=VERSION)] = Field(
        description="Version of the bundle, stored in it.", examples=["1.0.0"]
    )
    reproducible: bool = Field(
        True,
        description="Make executables whose bytes depend on nothing but the sources and the locked environment.",
        examples=[True],
    )
    examined: Literal["here", "project", "none"] = Field(
        "here",
        description="Whose examination of a build of jaxlib, or of a plugin, lets stagec change its code in memory "
        'while it compiles: "project", that of its own table alone; "here", for a build that has no row there, also '
        'one that this build makes itself, once. With "none" no code of a compiler is changed: it '
        "compiles for a CPU on a machine that has its instructions, the executable needs what XLA could use of that "
        "machine, and another machine, or another run, may make other bytes.",
        examples=["none"],
    )
    bundle_size: Bytes = Field(
        None,
        description="Size that the bundle's file may have. `<manifest>.size_test` fails if it is larger.",
        examples=["20MB"],
    )
    jaxlib: Jaxlib = None
    serves: Annotated[
        tuple[Annotated[str, StringConstraints(pattern=naming.JAXLIB)], ...], AfterValidator(read_distinct)
    ] = Field(
        (),
        description="Releases of jaxlib in your fleet. Without an executable of each of them, the bundle is not built.",
        examples=[["jaxlib==0.10.1", "jaxlib==0.10.2"]],
    )
    runs_on: Annotated[
        tuple[Annotated[str, StringConstraints(pattern=RELEASE)], ...], AfterValidator(read_distinct)
    ] = Field(
        (),
        description="Newer releases of jaxlib that run the executables for CPUs as they are. The build calls each of "
        "them once with each release, and fails where it is not right. A release that compiles for a target has its "
        "own there. It is declared in the workspace.",
        examples=[["0.12.0"]],
    )
    jax_cache: JaxCache = None
    jax_cache_machines: dict[str, Annotated[tuple[Fingerprint, ...], AfterValidator(read_distinct)]] = Field(
        {},
        description="For targets by name, the machines whose programs find entries without `import stagec.jax_cache`: "
        "what `python -m stagec.jax_cache` prints there.",
        examples=[{"cpu-avx2": ["85efd4ace077aae1"]}],
    )


TARGETS: Mapping[str, type[CpuTarget | CudaTarget | RocmTarget | TpuTarget]] = {
    "cpu": CpuTarget,
    "cuda": CudaTarget,
    "rocm": RocmTarget,
    "tpu": TpuTarget,
}
"""The table of each platform."""
Target: TypeAlias = Annotated[CpuTarget | TpuTarget | CudaTarget | RocmTarget, Field(discriminator="platform")]
"""Hardware to compile for; its platform says which table it is."""


class Mesh(Table):
    """An arrangement of devices along named axes, as jax.sharding.Mesh. You need no device to build for it."""

    axes: dict[Identifier, Annotated[int, Field(ge=1)]] = Field(
        min_length=1,
        description="Number of devices along each axis, in the order in which devices are counted.",
        examples=[{"data": 2, "model": 2}],
    )
    axis_types: tuple[Literal["Auto", "Explicit"], ...] = Field(
        (),
        description="JAX's type of each axis, in the same order, as jax.make_mesh takes them (jax.sharding.AxisType). "
        "Without types, jax.make_mesh makes all axes Explicit. Over them arrays have their split in their types, and "
        "in_shardings says it of the arguments. In a part of the function, jax.sharding.explicit_axes and auto_axes "
        "change a type. Default: all are Auto.",
        examples=[["Explicit", "Explicit"]],
    )


class Variant(Table):
    """One combination of static arguments."""

    static: dict[Identifier, Annotated[Any, PlainValidator(read_static), WithJsonSchema(STATIC_SCHEMA)]] = Field(
        min_length=1,
        description="Static arguments of this variant, with values. Those of the function apply too.",
        examples=[{"power": 2}],
    )


class Limits(Table):
    """What the executables of a function may take on one target. If one takes more, the build fails."""

    peak_memory: Bytes = Field(
        None,
        description="Memory of one device while the function runs: arguments, results and temporaries. Without it, "
        "the device's memory is the limit.",
        examples=["2GiB"],
    )
    flops: Annotated[int | None, PlainValidator(read_count), WithJsonSchema(AMOUNT_SCHEMA)] = Field(
        None,
        description="Operations of one device in a call. An operation in a loop counts as often as the loop runs.",
        examples=["1.5e12"],
    )
    bytes_accessed: Bytes = Field(
        None,
        description="Bytes of its main memory that one device reads and writes in a call. An access in a loop "
        "counts as often as the loop runs.",
        examples=["40GB"],
    )
    collectives: Annotated[
        int | dict[str, int] | None, PlainValidator(read_collectives), WithJsonSchema(COLLECTIVES_SCHEMA)
    ] = Field(
        None,
        description="How often devices exchange arrays in a call. Or a table with a number for each kind; kinds "
        "that the table leaves out have no limit. An exchange in a loop counts as often as the loop runs.",
        examples=[4, {"all-reduce": 2, "all-gather": 0}],
    )
    executable_size: Bytes = Field(None, description="Size of the executable's file.", examples=["20MB"])
    registers: Annotated[int | None, PlainValidator(read_count), WithJsonSchema(AMOUNT_SCHEMA)] = Field(
        None,
        description="Registers of a thread, in each kernel. Only for GPUs, as are shared_memory and spills.",
        examples=[128],
    )
    shared_memory: Bytes = Field(
        None, description="Shared memory of a block, in each kernel. Only for GPUs.", examples=["64KiB"]
    )
    spills: Bytes = Field(
        None,
        description="Bytes that a thread of each kernel stores and loads because registers run out, added up. Only for "
        "GPUs.",
        examples=[0],
    )
    compile_time: Annotated[
        float | None, PlainValidator(read_seconds), WithJsonSchema({"type": ["integer", "number"], "minimum": 0})
    ] = Field(None, description="Seconds that compiling may take. If it takes longer, stagec warns.", examples=[60])
    allow_unknown: bool = Field(
        False,
        description="Build an executable even if stagec cannot find out a number that has a limit.",
        examples=[True],
    )


Tolerance: TypeAlias = Annotated[int | str | None, PlainValidator(read_tolerance), WithJsonSchema(AMOUNT_SCHEMA)]


class Baseline(Table):
    """By how much the executables of a function may outgrow the baseline before `<manifest>.baseline_test` fails."""

    peak_memory: Tolerance = Field(
        None,
        description="Memory of one device while the function runs: a share such as 2%, or an amount. Default: 1%.",
        examples=["2%", "64KiB"],
    )
    flops: Tolerance = Field(None, description="Operations of one device in a call. Default: 0%.", examples=["0.5%"])
    bytes_accessed: Tolerance = Field(
        None, description="Bytes that one device reads and writes in a call. Default: 1%.", examples=["5%"]
    )
    executable_size: Tolerance = Field(
        None, description="Size of the executable's file. Default: 5%.", examples=["10%"]
    )
    registers: Tolerance = Field(
        None,
        description="Registers of a thread of the kernel with the most, on GPUs. Default: the test shows "
        "them, and never fails because of them.",
        examples=["10%"],
    )
    shared_memory: Tolerance = Field(
        None,
        description="Shared memory of a block of the kernel with the most, on GPUs. Default: the test shows "
        "it, and never fails because of it.",
        examples=["0%"],
    )
    spills: Tolerance = Field(
        None,
        description="Bytes that a thread of each kernel stores and loads because registers run out, added up, on "
        "GPUs. Default: 0.",
        examples=[16],
    )
    collectives: Tolerance = Field(
        None, description="How often devices exchange arrays in a call, for each kind. Default: 0.", examples=[1]
    )
    operations: Tolerance = Field(
        None,
        description="How many instructions of each kind run in a call. Default: the test shows them, and never "
        "fails because of them.",
        examples=["10%"],
    )


class Padding(Table):
    """How the loader pads a call to the next larger bucket of a dimension; it cuts the results back."""

    fill: Annotated[
        int | float | bool, PlainValidator(read_fill), WithJsonSchema({"type": ["integer", "number", "boolean"]})
    ] = Field(0, description="The value of the added elements.", examples=[-1])
    mask: Identifier = Field(
        "",
        description="A keyword argument that says which elements are real: booleans along the dimension, or an "
        "integer, the real size. The caller may leave it out.",
        examples=["valid"],
    )


class State(Table):
    """What a server keeps on the device between the requests of a sequence. Clients neither send nor get it."""

    argument: str = Field(
        "",
        description="The path of the argument that takes it, as `stagec inspect` shows it; all arrays below it. A "
        'sequence begins with zeros, or with the weights that `bind` names. "": the function does not read it.',
        examples=["cache"],
    )
    result: str = Field(
        "",
        description='The path of the result that takes its place. "": the function does not change it.',
        examples=["result[1]"],
    )
    idle: float | None = Field(
        None,
        gt=0,
        description="Seconds without a request after which a sequence ends. Default: what the server says (--idle).",
        examples=[600],
    )


class Serve(Table):
    """What a server calls the arrays of a function, keeps of them, and may do with their rows.

    Others have their path as their name.
    """

    inputs: dict[str, TensorName] = Field(
        {},
        description="Names of inputs by path: of the parameter, and in it, as `stagec inspect` shows them.",
        examples=[{"batch['image']": "image"}],
    )
    outputs: dict[str, TensorName] = Field(
        {}, description="Names of outputs by path, which starts with result.", examples=[{"result['probs']": "probs"}]
    )
    state: dict[Identifier, State] = Field(
        {},
        description="What is kept between the requests of a sequence, by name. Functions that give one name share it: "
        "one may read a prompt into a cache, and another decode with it.",
        examples=[{"cache": {"argument": "cache", "result": "result[1]"}}],
    )
    rows: Literal["", "independent"] = Field(
        "",
        description="`independent`: each row of a result depends on the same row of the inputs alone, so that a server "
        "may run rows of several clients in one call. Default: only where the server proves it on the StableHLO.",
        examples=["independent"],
    )


class Weights(Table):
    """The arrays that a bound argument consists of."""

    file: Annotated[str, StringConstraints(pattern=WEIGHTS)] = Field(
        description="A safetensors file, by its path relative to the manifest's folder. A Bazel target may write it.",
        examples=["weights.safetensors"],
    )
    prefix: str = Field(
        "", description="What the names of the argument's arrays start with in the file.", examples=["encoder."]
    )
    external: bool = Field(
        False,
        description="Leave the file out of the bundle, which has its digest, and is deployed beside it.",
        examples=[True],
    )


class OutputTolerance(Table):
    """How far one result may be from the golden one."""

    rtol: float | None = Field(
        None, ge=0, description="Relative tolerance. Default: that of the function.", examples=[1e-2]
    )
    atol: float | None = Field(
        None, ge=0, description="Absolute tolerance. Default: that of the function.", examples=[1e-3]
    )


class Golden(Table):
    """Inputs and outputs that the bundle stores with a function, to check its executables with."""

    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the generated inputs.", examples=[0])
    inputs: Annotated[str, StringConstraints(pattern=INPUTS)] = Field(
        "",
        description="A file of inputs instead of generated ones, by its path relative to the manifest's folder: "
        "an array for each argument that is not bound, named by its path, such as args[0]['w']. A Bazel target "
        "may write it.",
        examples=["golden.npz"],
    )
    bucket: dict[Identifier, int] = Field(
        {}, description="The bucket of the inputs. Default: the smallest.", examples=[{"batch": 8}]
    )
    rtol: float | None = Field(
        None,
        ge=0,
        description="Relative tolerance. Default: the square root of the dtype's epsilon; integers must be equal. "
        "Where devices run executables, f32 and c64 have the epsilon of TF32 on GPUs of NVIDIA, and of bfloat16 on "
        "TPUs: XLA rounds the factors of products to these.",
        examples=[1e-5],
    )
    atol: float | None = Field(None, ge=0, description="Absolute tolerance. Default: as for rtol.", examples=[1e-6])
    outputs: dict[str, OutputTolerance] = Field(
        {},
        description="Tolerances of single results, by their paths as `stagec run --golden` prints them.",
        examples=[{"result['logits']": {"rtol": 1e-2}}],
    )
    optimized: bool = Field(
        False,
        description="Also run on CPUs what the compilers of devices decided, and compare it: "
        "`<manifest>.golden_cuda_optimized_test` and `<manifest>.golden_tpu_optimized_test`. They need no device.",
        examples=[True],
    )


class Function(Tracing):
    """A function to build: where it is, what it takes, and what stagec makes of it."""

    entry: ModuleOrEntry = Field(
        description="The Python function, package.module:attribute. Or a StableHLO module: a .mlir or .mlirbc file "
        "by its path relative to the manifest's folder. Its function main says what the arguments are. Name the "
        "file in data of the macro too.",
        examples=["examples.digits.model:predict", "scale.mlir"],
    )
    frontend: Literal["jax", "arrays"] | None = Field(
        None,
        description="What traces the function: jax, or arrays for one of stagec_arrays.numpy, which needs no JAX. "
        "Default: jax. A StableHLO module has its own.",
        examples=["arrays"],
    )
    args: Annotated[
        tuple[Any, ...] | None, PlainValidator(read_args), WithJsonSchema({"type": "array", "items": TREE_REFERENCE})
    ] = Field(
        None,
        description="Positional arguments: a tree of avals for each.",
        examples=[[{"w": "f32[64,10]", "b": "f32[10]"}, "f32[batch,64]"]],
    )
    kwargs: dict[Identifier, Annotated[Any, PlainValidator(read_tree), WithJsonSchema(TREE_REFERENCE)]] | None = Field(
        None, description="Keyword arguments: a tree of avals for each name.", examples=[{"mask": "bool[batch]"}]
    )
    avals: Entry | None = Field(
        None,
        description="Instead of args and kwargs: a Python function without parameters that returns the arguments, "
        "a tuple or a dict of trees of jax.ShapeDtypeStruct, such as jax.eval_shape returns. The export calls it. "
        "Or that tuple or dict itself: an array stands for its dtype and shape. A Python number in it is an "
        "argument, as jax.jit traces it, wherever it is; only below an Equinox module it is a constant, as in "
        "eqx.filter_jit. A number that must stay constant goes into static, or is a static field of its class.",
        examples=["examples.digits.model:train_step_avals"],
    )
    platforms: Annotated[tuple[Platform, ...] | None, AfterValidator(read_distinct)] = Field(
        None,
        min_length=1,
        description="Platforms of the exported artifact. Default: those of the targets.",
        examples=[["cpu", "cuda", "tpu"]],
    )
    targets: Annotated[tuple[str, ...], AfterValidator(read_distinct)] = Field(
        (),
        description="The targets to compile executables for: names of tables [targets.NAME], short names that "
        "`stagec targets` lists, and TPU topologies. In the names of artifacts, a topology has - for the colon.",
        examples=[["cpu"], ["cpu-avx2", "h100-sxm", "v5e:2x2"]],
    )
    buckets: dict[Identifier, Annotated[tuple[int, ...], AfterValidator(read_sizes)]] = Field(
        {},
        description="Sizes of the symbolic dimensions to compile for: one executable for each combination.",
        examples=[{"batch": [1, 8, 64]}],
    )
    padding: dict[Identifier, Padding] = Field(
        {},
        description="Dimensions along which the loader pads a call to the next larger bucket. Only for "
        "functions whose results for real elements do not depend on the added ones, or that take a mask. "
        "Without it, a call must have the sizes of a bucket.",
        examples=[{"length": {"fill": 0, "mask": "valid"}}],
    )
    bind: dict[
        Annotated[str, StringConstraints(pattern=ARGUMENT)],
        Annotated[Weights, BeforeValidator(read_weights, json_schema_input_type=str | Weights)],
    ] = Field(
        {},
        description="Arguments whose data comes with the bundle, by the name of the Python parameter or by "
        'position, as in "args[0]": a safetensors file, or a table. The file names each array by its path in the '
        "argument, such as hidden.w or layers.0.w. A caller leaves the argument out.",
        examples=[{"params": "weights.safetensors"}],
    )
    serve: Serve | None = Field(
        None, description="How `stagec serve` offers the function.", examples=[{"inputs": {"x": "image"}}]
    )
    constraints: tuple[Annotated[str, AfterValidator(read_constraint)], ...] = Field(
        (),
        description="What holds for the symbolic dimensions, with ==, >= or <=. The function in avals makes them with "
        "their constraints: jax.export.symbolic_shape has a parameter for these.",
        examples=[["batch % 8 == 0"]],
    )
    static: dict[Identifier, Annotated[Any, PlainValidator(read_static), WithJsonSchema(STATIC_SCHEMA)]] = Field(
        {},
        description="Keyword arguments that are fixed when JAX traces the function (static_argnames), with values. "
        "Arrays become tuples. A call with another value, or a value of another type, is refused.",
        examples=[{"temperature": 1.0}],
    )
    variants: dict[Name, Variant] = Field(
        {},
        description="Several combinations of static arguments, each by a name of your choice. The artifacts of "
        "variant V of function F are MANIFEST.F-V, MANIFEST.F-V.TARGET and so on; there is no MANIFEST.F. A caller "
        "of F passes the static values by keyword, as in JAX, and the variant that has them runs. Values are the "
        "same where their types are too: 1, 1.0 and true are three variants.",
        examples=[{"square": {"static": {"power": 2}}, "cube": {"static": {"power": 3}}}],
    )
    donate_argnums: Annotated[tuple[Annotated[int, Field(ge=0)], ...], AfterValidator(read_distinct)] = Field(
        (), description="Positions of the arguments whose memory the results may reuse.", examples=[[0]]
    )
    donate_argnames: Annotated[tuple[Identifier, ...], AfterValidator(read_distinct)] = Field(
        (), description="Names of the arguments whose memory the results may reuse.", examples=[["state"]]
    )
    keep_unused: bool = Field(False, description="Keep arguments that the function does not use.", examples=[True])
    inline: bool = Field(False, description="Inline the function into its callers when it is traced.", examples=[True])
    jax_cache: JaxCache = None
    jax_cache_committed: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...] = Field(
        ((),),
        min_length=1,
        description="For jax_cache: the positional arguments that programs pass as arrays on a device that they chose, "
        "as jax.device_put(x, device) and checkpoints give them. JAX has that in its keys. A list of positions for "
        "each way in which programs call the function. Default: none of the arguments. A function with a mesh needs no "
        "such list.",
        examples=[[[], [0]]],
    )
    mesh: Name | None = Field(
        None,
        description="The mesh to lower for. lax.with_sharding_constraint and shard_map use it by default.",
        examples=["dp"],
    )
    in_shardings: Annotated[Any, PlainValidator(read_shardings), WithJsonSchema(SHARDINGS_REFERENCE)] = Field(
        None,
        description="How the positional arguments are split over the mesh: a spec for all, or an array with a tree "
        "of specs for each.",
        examples=[[{"w": "P(model, None)", "b": "P()"}, "P(data)"]],
    )
    out_shardings: Annotated[Any, PlainValidator(read_shardings), WithJsonSchema(SHARDINGS_REFERENCE)] = Field(
        None, description="How the result is split over the mesh: a tree of specs.", examples=["P(data)"]
    )
    disabled_checks: Annotated[
        tuple[Annotated[str, AfterValidator(read_check)], ...], AfterValidator(read_distinct)
    ] = Field(
        (),
        description='Safety checks of jax.export to switch off: "platform" (other platforms than those exported '
        "for may run the artifact). Custom calls are in allow_custom_calls.",
        examples=[["platform"]],
    )
    allow_custom_calls: Annotated[tuple[str, ...], AfterValidator(read_distinct)] = Field(
        (),
        description="Custom calls that the module may have although stagec does not know who provides them.",
        examples=[["my_kernel"]],
    )
    plugins: Annotated[tuple[Literal["cuda"], ...], AfterValidator(read_distinct)] = Field(
        (),
        description="Platforms whose plugin JAX needs to lower the function: cuda, for Pallas kernels of Mosaic "
        "GPU. Bazel downloads it when it exports the function.",
        examples=[["cuda"]],
    )
    limits: dict[str, Limits] = Field(
        {},
        description="What the executables may take, by the name of the target as in targets. Limits do not change "
        "the bytes of an artifact.",
        examples=[{"cpu": {"peak_memory": "2GiB"}}],
    )
    baseline: Baseline | None = Field(
        None,
        description="By how much the executables may grow beyond the manifest's baseline. Tolerances do not change "
        "the bytes of an artifact.",
        examples=[{"peak_memory": "2%"}],
    )
    golden: Golden | None = Field(
        None,
        description="Store inputs and outputs of the function in the bundle: inputs of one bucket, generated or "
        "from a file, and what the function makes of them: under jax.jit, if JAX traces it. "
        "`<manifest>.golden_test` compares the executables for CPUs, "
        "`<manifest>.golden_cuda_test` and `<manifest>.golden_tpu_test` those for devices.",
        examples=[{"seed": 0, "rtol": 1e-5}],
    )
    vjp_order: Literal[0, 1, 2] = Field(
        0, description="How many times you can differentiate the exported artifact (reverse mode).", examples=[1]
    )
    description: str = Field(
        "", description="Free text for readers; changes no artifact.", examples=["Class scores of images."]
    )

    def combinations(self) -> Iterator[tuple[str, Mapping[str, Static]]]:
        """Name and static values of each variant; one without a name where there are no variants."""
        if not self.variants:
            yield "", self.static
        for name, variant in self.variants.items():
            yield name, {**self.static, **variant.static}

    @property
    def served(self) -> dict[str, Any]:
        """What `serve` has, without what is empty, sorted by name."""
        given = self.serve.model_dump(exclude_defaults=True) if self.serve else {}
        return {key: dict(sorted(value.items())) if isinstance(value, dict) else value for key, value in given.items()}

    def every_bucket(self) -> Iterator[Mapping[str, int]]:
        """Every combination of the sizes, dimensions sorted by name; one empty bucket if there are none."""
        names = sorted(self.buckets)
        for sizes in itertools.product(*(self.buckets[name] for name in names)):
            yield dict(zip(names, sizes, strict=True))


class Document(Table):
    """Manifest of stagec: the functions to build ahead of time and the hardware to build them for."""

    manifest: Header = Field(
        description="What is built: its name, its version, and what holds for all functions.",
        examples=[{"name": "digits", "version": "1.0.0"}],
    )
    targets: dict[Name, Target] = Field(
        {},
        description="The hardware to compile for, by a name of your choice.",
        examples=[{"cpu": {"platform": "cpu", "isa": "AVX2"}}],
    )
    meshes: dict[Name, Mesh] = Field(
        {},
        description="Meshes to split arrays over, by a name of your choice.",
        examples=[{"dp": {"axes": {"data": 2, "model": 2}}}],
    )
    functions: dict[Name, Function] = Field(
        min_length=1,
        description="The functions to build, by name.",
        examples=[{"predict": {"entry": "examples.digits.model:predict", "args": ["f32[batch,64]"]}}],
    )
