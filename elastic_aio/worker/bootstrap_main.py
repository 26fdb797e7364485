"""The command of a function worker: runs `bootstrap` from its cached bytecode.

A script is compiled anew in each interpreter that runs it; a module is not.
"""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_aio.worker import bootstrap
else:
    import bootstrap  # found by the line above

# What the parent pickled by our name is found here, not imported again.
sys.modules["elastic_aio.worker.bootstrap"] = sys.modules.pop("bootstrap")
sys.exit(bootstrap.main(sys.argv[1:4]))
