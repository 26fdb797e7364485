"""`python -m elastic_aio` is `aio-elastic`."""

import os
import sys

# As of `aio-elastic`: a file of the current directory may have the name of a module.
if sys.path[:1] == [os.getcwd()] and not __file__.startswith(f"{sys.path[0]}/elastic_aio/"):
    del sys.path[0]

from elastic_aio.cli import entry

if __name__ == "__main__":
    raise SystemExit(entry())
