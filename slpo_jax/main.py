"""`python -m slpo_jax.main ..`, which is `slpo train ..`."""

from slpo_jax.cli import main as command

__doc__ = command.__doc__
run = command.run

if __name__ == "__main__":
    run()
