"""Version and requirements of the distribution; everything else stands in pyproject.toml.

The pins of requirements/*.txt are the one list of dependencies: the Makefile installs them, the
extras repeat them."""

from pathlib import Path

from setuptools import setup


def pins(name: str) -> list[str]:
    lines = (Path(__file__).parent / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-r"))]


setup(
    version="0.1.0",
    install_requires=pins("base"),
    extras_require={
        "cpu": pins("cpu"),
        "gpu": pins("gpu"),
        "test": pins("test"),
        "docs": pins("docs"),
    },
)
