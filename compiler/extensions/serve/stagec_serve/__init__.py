"""A server of bundles: the Open Inference Protocol v2 over HTTP, and batches that fill the buckets of a bundle."""
