"""Run the forwards of a model under a policy; `plan` lists the passes of each."""
