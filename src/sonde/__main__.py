"""`python -m sonde` is `sonde`."""

import sys

from sonde.cli import main

if __name__ == "__main__":  # the processes of a demo import this module too
    sys.exit(main())
