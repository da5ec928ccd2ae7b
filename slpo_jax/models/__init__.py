"""Backbones, reasoners and the stopping gate (Linen is used here and in `architectures/` alone)."""
