"""The Open Inference Protocol v2 over gRPC, for the server of bundles that `stagec_serve` is."""
