"""``ckpt-tools serve``: model repository, batching, Open Inference Protocol v2, metrics; HTTP, gRPC, Ray Serve."""
