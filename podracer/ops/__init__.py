"""Pure maths, each with its equation and its source. Time comes first; `vmap` adds the batch.

Names show their time: `v_tm1` belongs to the timestep acted on, `v_t` to the next one.
"""
