"""Shorten prompts with a small model, for engines that cannot run a policy.

Calls go in one direction: `chat` renders the prompt and knows which words are the template's;
`tokens` finds where each token is in the text, and what is never cut; `scoring` finds what each
token is worth to the model that reads it; `chunks` decides what is kept; `segments` makes the text
and the ids of the rest; `compressed` is what the caller gets.

Scores come either from a look-ahead, in which every decoded token is a turn, so that its query is
observed, or from a scorer at a filter layer, through the first pass of a restart that keeps almost
nothing.
"""
