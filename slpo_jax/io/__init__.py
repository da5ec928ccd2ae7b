"""Reading and writing, nothing else: files, the hub, Orbax."""
