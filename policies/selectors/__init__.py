"""Selectors: which keys and values does a layer keep for decoding?"""
