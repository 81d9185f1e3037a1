"""Decode an answer under a policy that bounds how many of its tokens layers hold."""
