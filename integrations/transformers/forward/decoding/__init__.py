"""Decoding an answer under a policy that bounds what layers hold of it."""
