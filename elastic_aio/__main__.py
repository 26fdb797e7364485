"""`python -m elastic_aio` is `aio-elastic`."""

import os
import sys

# As of `aio-elastic`: a file of the current directory may have the name of a module.
if not sys.flags.safe_path and not __file__.startswith(f"{sys.path[0]}/elastic_aio/"):
    sys.path[0] = os.path.dirname(sys.executable)

from elastic_aio.cli import entry

if __name__ == "__main__":
    raise SystemExit(entry())
