module @scale {
  func.func @main(%x: tensor<4x3xf32>, %factor: tensor<3xf32>) -> tensor<4x3xf32> {
    %0 = stablehlo.broadcast_in_dim %factor, dims = [1] : (tensor<3xf32>) -> tensor<4x3xf32>
    %1 = stablehlo.multiply %x, %0 : tensor<4x3xf32>
    return %1 : tensor<4x3xf32>
  }
}
