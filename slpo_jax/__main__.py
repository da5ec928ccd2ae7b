from slpo_jax.cli import main

main()
