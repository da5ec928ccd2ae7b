"""SLPO in JAX: reinforcement learning with verifiable rewards for latent reasoners."""
