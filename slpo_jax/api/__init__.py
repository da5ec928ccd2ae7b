"""What `import slpo_jax` offers, with nothing else to import: load, solve, evaluate, train, export."""
