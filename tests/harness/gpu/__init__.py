"""Runs on GPUs for the tests of tests/gpu."""
