"""`python -m jaxserve`: the same as the `jaxserve` command."""

import sys

from jaxserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
