"""Typed settings, and custom functions that settings refer to. This package does not import torch.

`config` merges and checks the settings; `config_keys` lists and parses them; `custom_function` loads `FILE.py:name`.
"""
