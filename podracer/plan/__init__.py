"""What a run will need before a machine is rented: memory, speed, hours, price.

A model of the parts (simulator, acting, learning, transfer, reduction), each with its source:
`work` counts what a program computes, `memory` what it keeps, `parts` puts the times together,
`measured` takes them on this machine, and `check` holds the model against published points.
"""
