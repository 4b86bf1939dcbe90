"""Typed settings: merge, check and help; custom code that a setting names. Imports no torch.

`config` merges and checks the settings; `config_keys` lists and parses them; `custom_function` loads `FILE.py:name`.
"""
