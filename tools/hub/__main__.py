"""`python -m tools.hub [hub]` writes the hub's projects there."""

import sys
from pathlib import Path

from tools.hub import write

if __name__ == "__main__":
    for project in write(Path(sys.argv[1] if len(sys.argv) > 1 else "hub")):
        print(project)
