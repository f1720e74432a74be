"""All benchmarks: the conversions of `works.toml`, and the parts, which measure everything else."""

from benchmarks.conversions import WORKS
from benchmarks.runner import Benchmark

CONVERSIONS = tuple(Benchmark(work.name, "conversions:measure_conversion", work.about, 4.5) for work in WORKS.values())

PARTS = (
    Benchmark("memory", "commands:measure_memory", "Memory by size: DCP, 4 ranks → safetensors"),
    Benchmark("start-up", "commands:measure_startup", "Start-up"),
    Benchmark("predict", "inference:measure_predicting", "Inference: files and datasets"),
    Benchmark("load", "inference:measure_loading", "Inference: loading"),
    Benchmark("serve", "serving:measure_service", "Inference: the service"),
    Benchmark("fsdp2-step", "training:measure_training", "Training: a step of FSDP2"),
    Benchmark("zero2-step", "training:measure_training", "Training: a step of ZeRO-2"),
    Benchmark("resume", "training:measure_training", "Training: resuming"),
    Benchmark("stall", "training:measure_training", "Training: saves"),
    Benchmark("s3", "s3:measure_s3_conversion", "From S3 to S3, shards of 1.4 and 3.9 MiB", 2),
    Benchmark("s3-wide", "s3:measure_s3_conversion", "From S3 to S3, shards of 8 and 22 MiB", 2),
    Benchmark("s3-shares", "s3:count_copied_shares", "Shares that S3 can copy itself", 2),
    Benchmark("ray", "ray_driver:measure_driver", "The driver of `--runner ray`"),
)
