"""Addresses on GitHub of files of this repository."""

import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def repository() -> str:
    """Return the repository's address, without a slash at its end."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address: str = project["urls"]["Repository"]
    return address.rstrip("/")


def address_of(file: Path, anchor: str = "") -> str:
    """Return the address on GitHub of a file or folder of the repository.

    Args:
        file: An absolute path of something that exists.
        anchor: A heading in it; empty for none.
    """
    kind = "tree" if file.is_dir() else "blob"
    path = file.resolve().relative_to(ROOT).as_posix()
    return f"{repository()}/{kind}/main/{path}" + (f"#{anchor}" if anchor else "")
