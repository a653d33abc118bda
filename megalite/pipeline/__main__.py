"""`python -m megalite.pipeline zb_v --ranks 4`: a schedule drawn, and what it costs. See command.py."""

import sys

from megalite.pipeline.command import main

if __name__ == "__main__":
    sys.exit(main())
