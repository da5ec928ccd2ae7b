from slpo_jax.cli.commands import main

main()
