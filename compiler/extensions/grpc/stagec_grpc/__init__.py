"""gRPC: the Open Inference Protocol v2 for the server of bundles, and Bazel's for caches that machines share."""
