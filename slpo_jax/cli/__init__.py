"""The command line: `slpo COMMAND`."""
