"""Tests that a custom optimizer must pass before the first step of a run."""
