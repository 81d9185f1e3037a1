"""Numbers of bytes as they are written."""

import pytest

from kvpolicy.evaluation.commands.serve_check import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("80gb", 80 * 10**9),
        (" 24 GiB ", 24 * 2**30),
        ("40e9", 40 * 10**9),
        ("1.5kB", 1500),
        ("2TiB", 2 * 2**40),
        ("512", 512),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "GB", "80 gigs", "-1GB", "0", "1e999", "1.2.3GB", "nan"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="--memory must be a number of bytes such as 80GB, 24GiB"):
        parse_size(text, "--memory")
