"""What train.py is made of: configuration, launch, data on this rank, optimizer and learning rate, log.

Nothing is imported here: `megalite.train.launch` and `.config` cost no import of torch, which keeps `--help` fast.
"""
