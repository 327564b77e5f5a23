"""The GPU lane: checks and speeds on one device, with whatever a machine has installed.

    python -m tests.gpu check|bench|all [--device cpu] [--small] [--out DIRECTORY] [--bundle DIR]

Each part runs in a separate process, prints its findings as it ends, and is skipped by name where
a package is missing. Exit 1 means that a number is wrong or a part failed, 3 that every part was
skipped. docs/gpu.md says how to run it on a machine without a registry.
"""
