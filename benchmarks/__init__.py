"""Measurements that a claim of this project rests on. Each `make bench-NAME` is `python -m benchmarks.bench_NAME`."""
