"""A reader of the word tasks: it answers from the text alone, by rules of its own."""

from __future__ import annotations

from collections import Counter


def statements(document: str) -> tuple[dict[str, list[str]], dict[str, str], Counter[str]]:
    """Return the name by key, where roads lead, and how often words are listed or seen."""
    names: dict[str, list[str]] = {}
    roads: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for sentence in document.removeprefix("<bos>").split(" ."):
        words = sentence.split()
        if "call" in words:
            key, *name = words[words.index("call") + 1 :]
            names[key] = name
        elif words[:1] == ["road"]:
            roads[words[1]] = words[2]
        elif words[:1] == ["list"]:
            counts.update(words[1:])
        elif words[:2] == ["we", "saw"]:
            counts.update(word for word in words[2:] if word not in (",", "and"))
    return names, roads, counts


def read_answer(document: str, question: str) -> set[str]:
    """Return the words that answer a question."""
    names, roads, counts = statements(document)
    asked = question.removesuffix(" :")
    if asked in ("common word", "frequent word"):
        return {word for word, _ in counts.most_common(1)}
    if asked.startswith("road from "):
        node, reached = asked.split()[-1], set()
        while node in roads:
            node = roads[node]
            reached.add(node)
        return reached
    if asked.startswith("name past "):
        keys = [roads[asked.split()[-1]]]
    else:
        keys = asked.removeprefix("name ").replace(" and ", " , ").split(" , ")
    return {word for key in keys for word in names[key]}
