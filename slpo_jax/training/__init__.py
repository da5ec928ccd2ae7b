"""The stages of a run, and what they stand on."""
