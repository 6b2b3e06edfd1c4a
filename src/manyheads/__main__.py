"""`python -m manyheads` is `manyheads`, for launchers that start modules (`torchrun -m manyheads train ...`)."""

import sys

from manyheads.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
