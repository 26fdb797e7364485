"""The program of the guardian process: `python -I -S guardian_main.py LIST SOCKET PREFIX SERIAL`.

It runs `guard`, whose compiled form a cache keeps, in a session of its own.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # -I leaves this file's directory out of the path.
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    # By its name: type checkers know it as a module of the package.
    sys.exit(__import__("guard").main())
