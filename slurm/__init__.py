"""The ways in: `make exp` enters here, validates without torch, and starts the experiment."""
