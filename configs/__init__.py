"""Experiment settings: shared dataclasses, plus one Python module and one YAML file per experiment."""
