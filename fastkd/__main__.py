"""Entry point of the `fastkd` command and of ``python -m fastkd``."""

import sys


def main() -> None:
    """Run the command line, or say what is missing for it."""
    try:
        from fastkd.cli.main import app
    except ModuleNotFoundError as error:
        from fastkd._core.extras import how_to_get

        missing = (error.name or "a package").partition(".")[0]
        print(f"Error: {missing} is not installed; {how_to_get('train')}", file=sys.stderr)
        sys.exit(1)
    app()


if __name__ == "__main__":
    main()
