"""Run folders with their settings, results, provenance, metrics and claims, the comparison page, and W&B tracking.

`folder` creates and reads run folders; `claims` prevents two attempts from training at the same time;
the `wandb_*` modules run the tracking process. This package does not import torch.
"""
