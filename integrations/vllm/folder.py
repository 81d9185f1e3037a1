"""Find documents by name in one folder, and notice when their files change."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from kvpolicy.integrations.vllm.document import NAME, SUFFIX, ServedDocument
from kvpolicy.integrations.vllm.files import DocumentError

# So many first ids tell that a prompt begins with a document; fewer could be a text by chance.
TELLING = 8

Stamp = tuple[int, int, int]  # of a file: inode, time of change in nanoseconds, size


@attrs.define(eq=False)
class DocumentFolder:
    """The documents of one folder, by name.

    A file is read again only when it has changed. Clients give names, never paths.
    """

    path: Path
    _known: dict[str, tuple[Stamp, ServedDocument]] = attrs.field(factory=dict, init=False)
    _beginnings: dict[tuple[int, ...], str] = attrs.field(factory=dict, init=False)
    _listed: Stamp | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        if not self.path.is_dir():
            raise ValueError(f"documents must be a folder that exists, got {str(self.path)!r}")

    def get(self, name: object) -> ServedDocument:
        """Return a document by its file's name without ``.safetensors``, or raise DocumentError."""
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise DocumentError(
                f"a document's name must be letters, digits, _, - and ., got {name!r}"
            )
        path = self.path / f"{name}{SUFFIX}"
        try:
            stamp = _stamp(path)
        except OSError:
            self._known.pop(name, None)
            raise DocumentError(f"there is no document {name!r}") from None
        known = self._known.get(name)
        if known is None or known[0] != stamp:
            known = stamp, ServedDocument.load(path)
            self._known[name] = known
        return known[1]

    def names(self) -> list[str]:
        """Return the names of all files, sorted, also of those that `get` refuses."""
        return sorted(each.name.removesuffix(SUFFIX) for each in self.path.glob(f"*{SUFFIX}"))

    def readable(self) -> Iterator[ServedDocument]:
        """Yield all documents that can be read."""
        for name in self.names():
            try:
                yield self.get(name)
            except DocumentError:
                continue

    def begun_by(self, ids: Sequence[int]) -> str | None:
        """Return the name of the document whose placeholders a prompt begins with, if any.

        Only documents of at least `TELLING` entries are recognised.
        """
        if len(ids) < TELLING:
            return None
        try:
            stamp = _stamp(self.path)
        except OSError:  # without the folder there are no documents
            return None
        if stamp != self._listed:
            documents = [each for each in self.readable() if each.length >= TELLING]
            self._beginnings = {each.placeholders[:TELLING]: each.name for each in documents}
            self._listed = stamp
        return self._beginnings.get(tuple(ids[:TELLING]))


def _stamp(path: Path) -> Stamp:
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns, found.st_size
