"""The program of `probe.py`: it is compiled, loaded and called, in a child process."""

from __future__ import annotations

import os

_MODULE = """
func.func public @main(%x: tensor<4x4xf32>, %y: tensor<4x4xbf16>) -> (tensor<4x4xf32>, tensor<4x4xf32>) {
  %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
      : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %1 = stablehlo.tanh %0 : tensor<4x4xf32>
  %2 = stablehlo.dot_general %y, %y, contracting_dims = [1] x [0]
      : (tensor<4x4xbf16>, tensor<4x4xbf16>) -> tensor<4x4xbf16>
  %3 = stablehlo.convert %2 : (tensor<4x4xbf16>) -> tensor<4x4xf32>
  return %1, %3 : tensor<4x4xf32>, tensor<4x4xf32>
}
"""
"""With a product of bf16: 0.11.1 loads one of 0.11.2, and refuses it when it is called."""


def run(_: bytes) -> None:
    """Raise ValueError if the program has other results than NumPy; and whatever jaxlib raises."""
    os.environ["NPROC"] = "1"  # XLA's threads: the child has a limit of memory, and each takes some of its addresses
    import ml_dtypes
    import numpy as np
    from jaxlib import _jax
    from jaxlib.mlir import ir

    from stagec.pjrt import clients, dialects, turns
    from stagec.pjrt.executable import Executable

    (device,) = devices = clients.devices("cpu", 1)
    options = clients.compile_options([device.id])
    with dialects.make_context(), ir.Location.unknown(), turns.for_this_machine():
        module = ir.Module.parse(_MODULE)
        compiled = device.client.compile_and_load(module, _jax.DeviceList(tuple(devices)), options)
    x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
    y = np.arange(16, dtype=np.float32).reshape(4, 4)  # whose products bf16 has
    given = [x, y.astype(ml_dtypes.bfloat16)]
    result = ((4, 4), np.dtype(np.float32))
    loaded = Executable.load(
        bytes(compiled.serialize()), [(array.shape, array.dtype) for array in given], [result, result], (), devices
    )
    results = [array.numpy() for array in loaded.run([loaded.put(i, array) for i, array in enumerate(given)])]
    wanted = np.tanh(x @ x), (y @ y).astype(ml_dtypes.bfloat16).astype(np.float32)
    for array, right in zip(results, wanted, strict=True):
        if not np.allclose(array, right, rtol=1e-2, atol=1e-6):
            raise ValueError("it has wrong results")
