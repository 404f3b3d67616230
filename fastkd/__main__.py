"""Entry point of the `fastkd` command and of ``python -m fastkd``."""

import sys

import fastkd


def main() -> None:
    """Run the command line; where only the losses are installed, `doctor` and a short help."""
    try:
        from fastkd.cli.main import app
    except ModuleNotFoundError as error:
        sys.exit(_of_losses(sys.argv[1:], (error.name or "a package").partition(".")[0]))
    app()


def _of_losses(words: list[str], missing: str) -> int:
    """What the command can do without the extra `train`; the exit code."""
    from fastkd._core.extras import how_to_get

    if words == ["doctor"]:
        from fastkd.cli.doctor import examine

        return 0 if examine(print) else 1
    if words == ["--version"]:
        print(f"fastkd {fastkd.__version__}")
    elif words in ([], ["-h"], ["--help"]):
        print("Usage: fastkd doctor\n\nSay what is installed, which backends run, and check them.")
        print(f"All other commands need the extra train; {how_to_get('train')}")
    else:
        print(f"Error: {missing} is not installed; {how_to_get('train')}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    main()
