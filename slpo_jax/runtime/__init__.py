"""The machine: its devices and processes, its compilations, and the messages of a run in progress."""
