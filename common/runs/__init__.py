"""Run folders with their settings, results, provenance, metrics and claims. This package does not import torch.

`folder` creates and reads run folders; `claims` prevents two attempts from training at the same time; `result` defines
result.json, `provenance` records the source, and `metrics_writer` writes metrics.jsonl. The packages `tracking` and
`compare` send runs to W&B and compare them. Checkpoints and trained models are in `common.checkpoint` and
`common.models`.
"""
