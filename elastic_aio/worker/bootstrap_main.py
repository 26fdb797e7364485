"""The script of a function worker: runs the module `bootstrap`.

A script is compiled at every start, a module has cached bytecode.
"""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_aio.worker import bootstrap
else:
    import bootstrap  # found by the line above

# Calls refer to it by its full name: they must not import it again.
sys.modules["elastic_aio.worker.bootstrap"] = sys.modules.pop("bootstrap")
sys.exit(bootstrap.main(sys.argv[1:4]))
