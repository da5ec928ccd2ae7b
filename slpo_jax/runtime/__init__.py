"""The machine: its devices and processes, what is compiled, and what is said of a run while it goes."""
