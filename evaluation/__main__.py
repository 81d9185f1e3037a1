"""Run the `kvpolicy` command as ``python -m kvpolicy.evaluation``."""

import sys

from kvpolicy.evaluation.cli import main

if __name__ == "__main__":
    sys.exit(main())
