"""The memory that a run needs before it starts; where they are known its speed, hours and price.

No speed of another device is computed: a recorded one can be given.
"""
