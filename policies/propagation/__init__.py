"""Propagation policies: which tokens go on to the next layer during prefill?"""
