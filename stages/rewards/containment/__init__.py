"""What `stages.rewards.sandbox` runs as processes of its own: nothing here is called by a stage.

`supervisor` stands outside and watches; `room` builds what the program sees and starts it there;
`examiner` runs a problem's asserts against functions that live in the program's process. They run
under `python -I -S`, once for each program, so they import as little as they can.
"""
