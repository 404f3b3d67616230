"""Entry point of the `fastkd` command and of ``python -m fastkd``."""

import sys

import fastkd


def main() -> None:
    """Run the command line; without the extra `train` only `doctor` and a short help."""
    try:
        from fastkd.cli.main import app
    except ModuleNotFoundError as error:
        sys.exit(_without_train(sys.argv[1:], (error.name or "a package").partition(".")[0]))
    app()


def _without_train(arguments: list[str], missing: str) -> int:
    """Run a command that needs no package of the extra `train`; returns the exit code."""
    from fastkd._core.extras import how_to_get

    if arguments == ["doctor"]:
        from fastkd.cli.doctor import examine

        return 0 if examine(print) else 1
    if arguments == ["--version"]:
        print(f"fastkd {fastkd.__version__}")
    elif arguments in ([], ["-h"], ["--help"]):
        print("Usage: fastkd doctor\n\nSay what is installed, which backends run, and check them.")
        print(f"All other commands need the extra train; {how_to_get('train')}")
    else:
        what = f"fastkd {arguments[0]} needs the extra train ({missing} is not installed)"
        print(f"Error: {what}; {how_to_get('train')}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    main()
