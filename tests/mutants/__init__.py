"""Mistakes made on purpose, and the tests that notice them: `make mutants`."""
