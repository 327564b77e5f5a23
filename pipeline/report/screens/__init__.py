"""The screens of `braid look` on a terminal: the run (`overview`), and a stage's samples."""
