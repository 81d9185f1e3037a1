"""Hold an sdist and a wheel against the repository: nothing is missing, and nothing is too much.

python tests/tools/package/contents.py dist
"""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# About where the repository is kept, and of no use without it.
HOSTING = (".ci/", ".github/", ".gitignore", ".pre-commit-config.yaml", ".readthedocs.yaml")
# What setuptools adds.
ADDED = ("PKG-INFO", "setup.cfg", "kvpolicy.egg-info/")


def tracked() -> set[str]:
    """Return the repository's files, also those that are not committed yet."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return {name for name in found.stdout.splitlines() if (ROOT / name).exists()}


def wheel_names(files: set[str]) -> set[str]:
    """Return the names that a wheel must have: the mapped folders' files, by their package."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {folder: package for package, folder in settings["package-dir"].items()}
    found = set()
    for name in files:
        # The longest folder that is mapped and holds the file.
        parents = [str(parent) for parent in Path(name).parents]
        folder = next((parent for parent in parents if parent in folders), None)
        if folder is not None:
            below = Path(name).relative_to(folder)
            found.add(str(Path(folders[folder].replace(".", "/")) / below))
    return found


def sdist_of(path: Path) -> set[str]:
    """Return the names of an sdist's files, without its top folder and what setuptools adds."""
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    return {name for name in names if not name.startswith(ADDED)}


def wheel_of(path: Path) -> set[str]:
    """Return the names of a wheel's files, without its metadata."""
    with zipfile.ZipFile(path) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def differences(folder: Path) -> list[str]:
    """Return what is wrong with the sdist and the wheel of a folder, a line each."""
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    files = tracked()
    wanted = {name for name in files if not name.startswith(HOSTING)}
    pairs = ((sdist, sdist_of(sdist), wanted), (wheel, wheel_of(wheel), wheel_names(files)))
    lines = []
    for archive, found, expected in pairs:
        lines += [f"{archive.name} lacks {name}" for name in sorted(expected - found)]
        lines += [f"{archive.name} has {name}" for name in sorted(found - expected)]
    return lines


if __name__ == "__main__":
    wrong = differences(Path(sys.argv[1]))
    print("\n".join(wrong) or "sdist and wheel are complete")
    sys.exit(bool(wrong))
