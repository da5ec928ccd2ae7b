"""SLPO's step in PyTorch and transformers: what slpo_jax is compared with."""
