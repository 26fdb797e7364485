"""The script of a function worker: runs `bootstrap`, a module, since its bytecode is cached."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_aio.worker import bootstrap, interpreter, lines
else:
    import bootstrap  # found by the line above
    import interpreter
    import lines

# Calls refer to them by their full names: they must not import them again.
for name in ("bootstrap", "interpreter", "lines"):
    sys.modules[f"elastic_aio.worker.{name}"] = sys.modules.pop(name)
lines.write_lines()
# A worker that starts others pickles this class.
bootstrap.InheritedDescriptor.__module__ = "elastic_aio.worker.bootstrap"
interpreter.finalize(bootstrap.main(sys.argv[1:4]))
