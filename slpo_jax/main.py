"""`python -m slpo_jax.main ..`, which is `slpo train ..`."""

import sys

from slpo_jax.cli.command import run_command
from slpo_jax.cli.train import train

if __name__ == "__main__":
    run_command(train, sys.argv[1:], goes_on=True)
