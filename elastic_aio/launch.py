"""`python -m elastic_aio.launch`: torch.distributed.launch, with `--local-rank` and `--use-env`.

Only for the command line: in a program, `elastic_aio.launch` is the function, also after `import
elastic_aio.launch`.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from elastic_aio.cli import entry_launch

    sys.exit(entry_launch())
else:
    from elastic_aio.launcher import launch

    # The import system binds what it finds here to the package's attribute.
    sys.modules[__name__] = launch  # type: ignore[assignment]  # a function in a module's place
