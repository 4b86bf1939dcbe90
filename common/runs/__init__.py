"""The run folder: settings, result, provenance, metrics, claims, comparison page and W&B tracking. Imports no torch.

`folder` creates and reads run folders; `claims` prevents two attempts from training at the same time;
the `wandb_*` modules run the tracking process.
"""
