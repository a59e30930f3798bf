"""`python -m modulelens`: the same as the `modulelens` command, for when PATH is lost."""

from __future__ import annotations

import sys

from modulelens.cli import main

if __name__ == "__main__":
    sys.exit(main())
