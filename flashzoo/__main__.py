"""`python -m flashzoo`."""

import sys

from flashzoo.cli import main

sys.exit(main())
