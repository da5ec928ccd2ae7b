"""The one exception that means "the user can mend this"."""


class UserError(Exception):
    """Bad input. The message is one line: the key or file at fault, then the remedy.

    `slpo_jax.main` prints it without a traceback and exits with status 2.
    """
