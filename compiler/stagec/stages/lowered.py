"""`Lowered`: a StableHLO module for one platform with static shapes, made from an `Exported` without JAX.

Fields and methods are those of `jax.stages.Lowered` (https://docs.jax.dev/en/latest/jax.stages.html).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxlib import _jax, xla_client
from jaxlib.mlir import ir

from stagec.core.builds.specs import CompilerOption, TargetSpec
from stagec.core.sizes.avals import arrow
from stagec.pjrt import clients, compatibility
from stagec.stages import mlir
from stagec.stages.data import LoweredData
from stagec.stages.info import args_info, donate_argnums, out_info
from stagec.stages.shardings import Format, GSPMDSharding

if TYPE_CHECKING:
    from stagec.stages.compiled import Compiled


class Lowered(LoweredData):
    """A StableHLO module with static shapes for one platform, ready to compile and call.

    Methods are those of `jax.stages.Lowered` (https://docs.jax.dev/en/latest/jax.stages.html#jax.stages.Lowered).

    fun_name: name of the function.
    platform: the one platform it is for.
    in_tree, out_tree: structure of `(args, kwargs)` and of the result.
    flat_in_avals, flat_out_avals: static, in the order of the trees' leaves; a PRNG key is the u32 words that hold it,
        float0 is bool.
    kept_var_idx: sorted indices of the arguments that the module takes, among the leaves; the others are unused.
    donated: for each argument, whether the caller gives its buffer away.
    custom_calls: sorted names of the custom calls that the module makes.
    module: MLIR bytecode of the module; its locations hold argument names only, if it was exported with them.
    nr_devices: the number of devices that the module runs on, in one partition each.
    in_shardings, out_shardings: the sharding of each array; None if XLA may choose.
    in_memory_kinds, out_memory_kinds: the memory of each array that the module takes or returns, such as "pinned_host";
        None is the device's own.
    compiler_options: the function's own.
    """

    def __repr__(self) -> str:
        devices = f", {self.nr_devices} devices" if self.nr_devices > 1 else ""
        return f"Lowered({self.fun_name}{arrow(self.flat_in_avals, self.flat_out_avals)}, for {self.platform}{devices})"

    @property
    def args_info(self) -> Any:
        """An `ArgInfo` for each argument, in the structure `(args, kwargs)`."""
        return args_info(self.in_tree, self.flat_in_avals, self.donated)

    @property
    def in_avals(self) -> Any:
        """The `Aval` of each argument, in the structure `(args, kwargs)`."""
        return self.in_tree.unflatten(self.flat_in_avals)

    @property
    def out_info(self) -> Any:
        """An `OutInfo` for each result, in the structure of the result; no layout is known yet."""
        formats = [
            Format(None, GSPMDSharding(str(sharding)) if isinstance(sharding, xla_client.HloSharding) else sharding)
            for sharding in self.out_shardings
        ]
        return out_info(self.out_tree, self.flat_out_avals, formats)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Indices of the donated arguments, among the leaves of the arguments."""
        return donate_argnums(self.donated)

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """Return the module as jaxlib's `ir.Module` ("stablehlo", the default) or `XlaComputation` ("hlo").

        Raises ValueError for another dialect.
        """
        match dialect:
            case None | "stablehlo":
                with mlir.make_context():
                    return ir.Module.parse(self.module)
            case "hlo":
                return _jax.mlir.mlir_module_to_xla_computation(self.module, use_tuple_args=False)
        raise ValueError(f"unknown dialect: {dialect}; write stablehlo or hlo")

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """Return the module as a string.

        dialect: "stablehlo" (the default) or "hlo".
        debug_info: with locations, or with the metadata of HLO.

        Raises ValueError for another dialect.
        """
        module = self.compiler_ir(dialect)
        if dialect != "hlo":
            return str(module.operation.get_asm(enable_debug_info=debug_info))
        options = compatibility.hlo().HloPrintOptions.short_parsable()  # the form that XLA reads
        options.print_metadata = debug_info
        return str(module.as_hlo_module().to_string(options))

    def cost_analysis(self) -> dict[str, float]:
        """Return XLA's estimate before optimization, by XLA's names: "flops", "bytes accessed" and others."""
        module = self.compiler_ir("hlo").as_hlo_module()
        return dict(_jax.hlo_module_cost_analysis(clients.cpu_client(1), module))

    def compile(
        self,
        compiler_options: Mapping[str, CompilerOption] | None = None,
        target: TargetSpec | None = None,
        *,
        device_assignment: Any = None,
    ) -> Compiled:
        """Compile, and return a callable executable.

        compiler_options: as of `jit`. They go before those of the function.
        target: None means the CPU of this machine. Before you compile for a named target, call `prepare_process` of
            its backend, as the compile command does.
        device_assignment: not supported: an executable has no devices before it is loaded. JAX has this parameter.

        Raises CannotCompile if XLA refuses the module, an option or its value, and TypeError for `device_assignment`.

        >>> import numpy as np
        >>> lowered = stagec.jit(lambda x: x * 2).lower(np.ones(3, np.float32))
        >>> lowered.compile()(np.ones(3, np.float32))
        array([2., 2., 2.], dtype=float32)
        """
        if device_assignment is not None:
            raise TypeError(
                "compile() does not take device_assignment: an executable is for a number of devices, and loading says "
                "which: write stagec.load(PATH, devices=...)"
            )
        from stagec.stages.compiling import compile_program

        return compile_program(self, {**self.compiler_options, **(compiler_options or {})}, target)
