"""``python -m chairlift`` is the ``chairlift`` command."""

from chairlift.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
