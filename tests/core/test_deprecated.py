"""What authors were told of keeps its earlier name for one version, and says so."""

import pytest

from kvpolicy import host_counts, known


def test_counts_under_their_earlier_module() -> None:
    for name in ("known_counts", "protected_counts", "counts_under", "on_device"):
        with pytest.warns(DeprecationWarning, match=rf"use kvpolicy\.host_counts\.{name}"):
            assert getattr(known, name) is getattr(host_counts, name)
    with pytest.raises(AttributeError, match="nothing_such"):
        known.nothing_such  # noqa: B018
