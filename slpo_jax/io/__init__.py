"""Reading and writing, nothing else: files, the hub, Orbax, and where a run's files lie."""
