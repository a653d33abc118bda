"""`python -m megalite.comm`: each collective with every rank's tensor before and after. See demo.py."""

from megalite.comm.demo import main

if __name__ == "__main__":
    main()
