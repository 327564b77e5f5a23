"""A step computed again from a run's files, by arithmetic of its own: `braid audit`.

Nothing here imports the objectives, the models or the layouts that it judges: transformers' model
classes in float64, one sample at a time, in one process. Of Braid's own code only the formats of
its files are shared (a test holds that).
"""
