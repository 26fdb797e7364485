"""A worker that imports torch and then notes that it is ready: `importing.py NOTES`.

Rank 0 exits with 1 once all are ready, until the last attempt.  The notes are those
of `rank.py`.
"""

import importlib
import runpy
import sys
from pathlib import Path

importlib.import_module("torch")
sys.argv[2:] = ["fail", "end"]
runpy.run_path(str(Path(__file__).parent / "rank.py"), run_name="__main__")
