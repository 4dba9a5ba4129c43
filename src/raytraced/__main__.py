"""The command `raytraced`, also `python -m raytraced`: ready for Ctrl-C before anything else is imported."""

import sys


def main() -> int:
    """Run one command and return its exit code."""
    try:
        from raytraced.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("raytraced: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
