"""Settings: shared dataclasses, and one module and one YAML file per experiment."""
