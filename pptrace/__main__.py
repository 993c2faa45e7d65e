"""``python -m pptrace``: the command line without its script."""

from __future__ import annotations

import sys

from pptrace.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
