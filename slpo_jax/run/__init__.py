"""From a config to a run: the workdir, and one file a stage."""
