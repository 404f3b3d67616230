"""``python -m bench``: `fastkd bench`."""

import sys

from fastkd.__main__ import main

sys.argv.insert(1, "bench")
main()
