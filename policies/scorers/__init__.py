"""Scorers: how much does each token matter at a layer?"""
