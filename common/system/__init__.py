"""Processes, signals, network addresses, host memory, errors, seeds and text. Imports no torch.

`errors` defines `UserError` and the resumable exit status.
"""
