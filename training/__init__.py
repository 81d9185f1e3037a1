"""Train the three bundled models; no part of the package imports this folder.

`trainer` has the code they share: options, stages, the optimiser step, checkpoints. Each folder has
one model's rows, batches and stages, and a script `train`, which is run as ``python -m
training.needle.train --out DIR``.
"""
