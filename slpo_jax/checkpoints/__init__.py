"""Other programs' files: checkpoints in, checkpoints out."""
