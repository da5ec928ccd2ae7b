"""Rollout, surrogate, advantage and objective: one pure function an equation."""
