"""``python -m fastkd``: the same as the `fastkd` command."""

from fastkd.app.cli import main

main()
