"""The work of the commands: what each does after its options are parsed."""
