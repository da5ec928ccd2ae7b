"""SLPO in JAX: reinforcement learning with verifiable rewards for latent reasoners."""

import os

# transformers is here for tokenizers and configs alone, and need not advise on installing PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
