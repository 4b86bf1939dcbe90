"""Measurement and logging of training steps: time, memory, metrics, profiles, plots and tables.

`metrics_log` collects the values of a step for metrics.jsonl; `common.runs` writes and reads that file. `step_timing`
compares the ranks of a data-parallel run, `timing` measures function calls, `memory` and `profiler` measure a process,
`media` logs images and histograms, and `plots` and `tables` present results. Benchmarks are in tests/benchmarks.
"""
