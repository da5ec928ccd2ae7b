"""Backbones, reasoners and the stopping gate (the only room that uses Linen)."""
