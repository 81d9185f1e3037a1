"""The training of the bundled model with long answers, and which rule holds what of them."""
