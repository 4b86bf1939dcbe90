"""Start commands of the project in tests."""
