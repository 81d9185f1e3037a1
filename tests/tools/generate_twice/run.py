"""Transformers' own generation tests, every call made again with a `PolicyCache` that keeps all.

Run ``make transformers-tests TRANSFORMERS=/path/to/checkout``; see CONTRIBUTING.md.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import transformers

MODELS = ("llama", "qwen2", "mistral", "qwen3", "phi3", "gemma2", "olmo2", "gpt_oss")
# What the plugin is found in, as `generate_twice`; nothing else is there.
TOOLS = Path(__file__).resolve().parents[1]


def main(argv: list[str] | None = None) -> int:
    """Run the tests; 0 where all comparisons agree, 1 where one differs, 2 where none was made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="of Transformers, with its tests")
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="TYPE")
    parser.add_argument("--keyword", default="generat", help="pytest's -k")
    parser.add_argument("--out", type=Path, help="a JSON file for all comparisons")
    given = parser.parse_args(argv)
    try:
        files = test_files(given.checkout, given.models)
        check_version(given.checkout)
    except ValueError as error:
        parser.error(str(error))
    command = [sys.executable, "-m", "pytest", "-p", "generate_twice.plugin", "-k", given.keyword]
    command += ["-q", "-p", "no:cacheprovider", *map(str, files)]
    if given.out is not None:
        command.append(f"--generate-twice-out={given.out.resolve()}")
    # The checkout's `tests` is a package as this repository's is: nothing of here but the plugin
    # may be found, so that the folder to run in is the checkout.
    path = os.pathsep.join(filter(None, [str(TOOLS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=given.checkout, env=environment, check=False).returncode


def test_files(checkout: Path, models: list[str] | tuple[str, ...]) -> list[Path]:
    """The tests of models, relative to the checkout."""
    files = [Path("tests", "models", each, f"test_modeling_{each}.py") for each in models]
    for file in (Path("tests", "generation", "test_utils.py"), *files):
        if not (checkout / file).is_file():
            raise ValueError(
                f"checkout must be one of Transformers' repository, with its tests, but {checkout} "
                f"has no {file}; a source archive of a release has only some of them"
            )
    return files


def check_version(checkout: Path) -> None:
    """Check that the tests are those of the Transformers that is installed."""
    init = checkout / "src" / "transformers" / "__init__.py"
    found = re.search(r'__version__ = "([^"]+)"', init.read_text() if init.is_file() else "")
    version = found[1] if found else "unknown"
    if version != transformers.__version__:
        raise ValueError(
            f"checkout must be of the Transformers that is installed, {transformers.__version__}, "
            f"got {version}; run `git checkout v{transformers.__version__}` in it"
        )


if __name__ == "__main__":
    sys.exit(main())
