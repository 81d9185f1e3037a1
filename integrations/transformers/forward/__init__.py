"""One forward of a model under a policy: what comes in, what each layer sees and keeps."""
