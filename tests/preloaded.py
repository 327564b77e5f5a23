"""Imported by the process that the ranks are forked from, before any of them exists."""

from parallel.cpu import megatron

megatron.activate()
