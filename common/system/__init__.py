"""Processes, signals, network addresses, host memory, errors, seeds and text. This package does not import torch.

This package knows neither runs nor settings of a single experiment. `errors` defines `UserError` and the resumable exit
status, `seeds` derives all random streams from one seed, and `processes`, `network` and `host_memory` read the machine.
"""
