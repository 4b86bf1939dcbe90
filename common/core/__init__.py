"""Settings, errors, seeds, processes and network addresses. Imports no torch.

`config` merges and checks the settings; `errors` defines `UserError` and the resumable exit status.
"""
