"""Fuzzers of Braid's inputs: configurations and damaged run directories.

`python -m tests.fuzz --help` describes them; `make fuzz` runs them at full length.
"""
