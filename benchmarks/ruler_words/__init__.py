"""The training of the bundled model of word tasks."""
