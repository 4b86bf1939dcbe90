"""Settings, errors, seeds, processes and network addresses. This package does not import torch.

`config` merges and validates the settings. `errors` defines `UserError` and the exit status of a resumable run.
"""
