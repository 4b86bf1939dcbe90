"""W&B tracking: the tracking process, and the conversion to offline runs. This package does not import torch.

Training never calls W&B itself. `wandb_tracker` starts and stops the process `wandb_process`, which reads
metrics.jsonl. `wandb_rows` selects the rows to send, and `wandb_account` finds the account.
"""
