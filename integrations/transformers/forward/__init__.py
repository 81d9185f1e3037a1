"""Run one forward of a model under a policy: its inputs, and what each layer sees and keeps."""
