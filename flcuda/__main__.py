"""`python -m flcuda` is the command `flcuda`."""

import sys

from flcuda.cli import main

sys.exit(main())
