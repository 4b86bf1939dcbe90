"""The environment of tests: shared results, random choices, permissions, limits and fake devices."""
