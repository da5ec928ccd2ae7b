"""Rollouts, their scores, scorers, the surrogate and advantages: one pure function an equation."""
