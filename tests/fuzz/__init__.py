"""Fuzzers of what a person hands to Braid: configurations, and run directories that were damaged.

`python -m tests.fuzz --help` says what they do; `make fuzz` runs them at full length.
"""
