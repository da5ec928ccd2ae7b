"""Rollouts, their scores, scorers and advantages: one pure function an equation."""
