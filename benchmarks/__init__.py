"""Scripts that measure the library, and write their results to the folder ``results``.

Importing this package also makes kvpolicy importable from a checkout in which it is not installed,
as on a borrowed machine: the checkout's folders are then added to the package's path.
"""

from importlib.util import find_spec
from pathlib import Path

import kvpolicy

if find_spec("kvpolicy.policies") is None:
    kvpolicy.__path__.append(str(Path(__file__).resolve().parents[1]))
