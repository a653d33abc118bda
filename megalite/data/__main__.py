"""`python -m megalite.data`: tokenize text, inspect token files. See command.py."""

import sys

from megalite.data.command import main

if __name__ == "__main__":
    sys.exit(main())
