"""The audit: a step recomputed from a run's files, by independent arithmetic (`braid audit`).

Nothing here imports the objectives, the models or the layouts that it checks: transformers' model
classes in float64, one sample at a time, in one process. Of Braid's code it shares only the formats
of its files (a test checks that).
"""
