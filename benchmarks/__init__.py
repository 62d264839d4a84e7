"""Benchmarks of dshard beside FSDP2, DDP and the unsharded model: ``python -m benchmarks step``."""
