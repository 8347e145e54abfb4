"""Pure maths, each with its equation and its source. Time comes first; `vmap` adds the batch.

Names carry their time: `v_tm1` belongs to the timestep acted on, `v_t` to the one that followed.
"""
