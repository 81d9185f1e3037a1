"""The work of the commands: what each does once its options are read."""
