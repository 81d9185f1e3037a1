"""Run one forward of a model under a policy: read inputs, let layers attend, keep and drop."""
