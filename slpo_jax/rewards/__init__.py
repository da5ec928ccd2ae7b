"""Completions: reading them, and judging their answers."""
