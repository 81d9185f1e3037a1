"""The token ids of the needle language.

One set of symbols serves as keys, link names and values: a model that reads it has one copy
operation to learn, where separate sets for keys and values would need a mapping between them.
"""

PAD, BOS, END, KEY, LINK, QUERY, QUERY2, UNKNOWN = range(8)
SPECIAL_TOKENS = ("<pad>", "<bos>", "<end>", "KEY", "LINK", "QUERY", "QUERY2", "<unk>")
NUM_FILLERS = 88
NUM_SYMBOLS = 128
FILLERS = range(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + NUM_FILLERS)
SYMBOLS = range(FILLERS.stop, FILLERS.stop + NUM_SYMBOLS)


def token_names() -> list[str]:
    """Return the text of every token in the needle model's vocabulary, in the order of ids."""
    fillers = [f"f{index}" for index in range(NUM_FILLERS)]
    symbols = [f"s{index}" for index in range(NUM_SYMBOLS)]
    return [*SPECIAL_TOKENS, *fillers, *symbols]
