"""Names of policies and parts: known and checked without importing torch or other packages' code.

Importing torch takes a second. The names are in the entry points of the installed packages, so that
a command line with an unknown name is refused at once.
"""

from collections.abc import Collection, Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches
from importlib.metadata import EntryPoint, entry_points

from kvpolicy.checks import check_kind
from kvpolicy.errors import UnknownPolicyError

GROUP = "kvpolicy.policies"

# How names of parts end, and names of their classes.
_PART_KINDS = ("scorer", "selector", "propagation")


def entries() -> Iterable[EntryPoint]:
    """Return the entry points of policies and parts, this package's and others'."""
    return entry_points(group=GROUP)


def _is_own(entry: EntryPoint) -> bool:
    return str(getattr(entry, "value", "")).startswith("kvpolicy.policies:")


def _kind_declared(entry: EntryPoint) -> str:
    """Return the kind of one of this package's entries, which its class's name ends with."""
    class_name = entry.value.lower()
    return next((kind for kind in _PART_KINDS if class_name.endswith(kind)), "policy")


def name_of_known(name: str, kind: str, known: Collection[str]) -> str:
    """Return which known name a user means by a name, see `kvpolicy.registry.name_of`."""
    check_kind("name", name, str)
    plain = name.replace("-", "_")
    for written in (plain, f"{plain}_{kind}"):
        if written in known:
            return written
    bare = _letters(name)
    same = [each for each in known if _letters(each) in (bare, f"{bare}{kind}")]
    return same[0] if len(same) == 1 else plain


def _letters(name: str) -> str:
    """Return a name as names of classes are compared: without case, ``_`` and ``-``."""
    return name.replace("-", "").replace("_", "").lower()


def said(name: str, known: Iterable[str], text: str | None = None) -> str:
    """Return an unknown name for an error message, with the known names that resemble it.

    In the comparison ``-`` counts as ``_``, and case does not count. If ``text`` is given, it is
    written for the name.

    Example:
        >>> said("snapvk", ["fastkv", "snapkv"]), said("other", ["fastkv", "snapkv"])
        ('snapvk (did you mean snapkv?)', 'other')
    """
    spelt = {each.replace("-", "_"): each for each in known}
    asked = name.replace("-", "_").lower()
    near = get_close_matches(asked, spelt, n=1)
    if near:
        # Other names that are as near: "fastvk" is one typo away from both FastV and FastKV.
        ratio = SequenceMatcher(None, near[0], asked).ratio()
        near = get_close_matches(asked, spelt, cutoff=max(ratio - 0.1, 0.6))
    shown = name if text is None else text
    return f"{shown} (did you mean {' or '.join(spelt[each] for each in near)}?)" if near else shown


def check_known(asked: Mapping[str, Iterable[str]], known: Mapping[str, Collection[str]]) -> None:
    """Check that all names are known, as `name_of_known` understands them.

    Raises:
        UnknownPolicyError: Names are unknown; tells all of them, for each the nearest known ones.
    """
    wrong = []
    for kind, names in asked.items():
        unknown = []
        for name in dict.fromkeys(names):
            if name_of_known(name, kind, known[kind]) not in known[kind]:
                short = [each.removesuffix(f"_{kind}") for each in known[kind]]
                unknown.append(said(name, short, repr(name)))
        if unknown:
            listed = ", ".join(known[kind])
            wrong.append(f"no {kind} is named {' or '.join(unknown)}; known: {listed}")
    if wrong:
        raise UnknownPolicyError("; ".join(wrong))


def check_declared(asked: Mapping[str, Iterable[str]]) -> None:
    """Check names before anything heavy is imported, where that is possible.

    Only the code of another package can say whether its entry is a policy or a part. So if another
    package has entries, nothing is checked here, and `kvpolicy.registry.check_names` does it later.
    """
    found = list(entries())
    if all(_is_own(each) for each in found):
        kinds = {each: _kind_declared(each) for each in found}
        check_known(asked, {of: sorted(it.name for it in found if kinds[it] == of) for of in asked})
