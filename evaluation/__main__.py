"""``python -m kvpolicy.evaluation`` is the `kvpolicy` command."""

import sys

from kvpolicy.evaluation.cli import main

if __name__ == "__main__":
    sys.exit(main())
