"""The processes of `stages.rewards.sandbox`, which no stage calls directly.

`supervisor` watches from outside; `jail` builds the file system that the program sees and starts
it there; `examiner` runs a problem's asserts against functions in the program's process. They run
under `python -I -S`, once for each program, so they import as little as they can.
"""
