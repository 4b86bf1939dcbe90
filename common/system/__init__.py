"""Processes, signals, network addresses, host memory, errors, seeds and text. This package does not import torch.

`errors` defines `UserError` and the resumable exit status.
"""
