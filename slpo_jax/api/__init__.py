"""What `import slpo_jax` offers, with nothing else to import: load, solve, evaluate, train, export."""

from slpo_jax.runtime.progress import print_plainly

print_plainly()
