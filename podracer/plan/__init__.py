"""What a run will need before it starts: memory, and where they are known speed, hours and price.

`memory` has the shapes of what a run keeps and XLA's own layout of its program, `measured` the
speed of this machine. No speed of another device is computed: a recorded one can be given.
"""
