"""The trainings of the three bundled models, which no part of the package imports.

`trainer` has what they share: options, stages, the step of the optimiser, checkpoints. Each folder
has a model's rows, batches and stages, and a `train` to run, as in ``python -m
training.needle.train --out DIR``.
"""
