"""`python -m phi4mm_export` is the `phi4mm` command."""

from phi4mm_export.cli.app import main

if __name__ == "__main__":
    main()
