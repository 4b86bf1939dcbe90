"""Typed settings, and custom code that settings name. This package does not import torch.

This package defines no settings; the dataclasses are in `configs`. `config` merges and checks settings, and reads the
settings of a run. `config_keys` lists and parses settings, and `changed_settings` reads the settings that an attempt
has changed. `custom_code` finds and checks settings whose value is `FILE.py:name`, and `custom_function` loads the
file. `lookup` imports an object that a setting names.
"""
