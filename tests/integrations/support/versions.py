"""What the installed Transformers does otherwise than the newest: such tests say why they skip."""

from importlib.metadata import version

# 5.17's own models read otherwise there; what is refused, or reads rightly, on it is another list.
OLD = tuple(map(int, version("transformers").split(".")[:2])) < (5, 23)
