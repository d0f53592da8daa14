"""Package map: the top-level folders conf/ and launchers/ are installed inside the package.

All other metadata is in pyproject.toml.
"""

from setuptools import find_packages, setup

COMMANDS = ("train", "prepare", "evaluate", "transcribe", "export", "report", "study", "doctor")

setup(
    packages=[
        *find_packages(include=["speechtrain", "speechtrain.*"]),
        "speechtrain.conf",
        "speechtrain.launchers",
        "hydra_plugins.speechtrain_study",
    ],
    package_dir={"speechtrain.conf": "conf", "speechtrain.launchers": "launchers"},
    package_data={
        "speechtrain": ["py.typed", "data/corpora/digits_audio/*", "report/*.html", "report/*.md"],
        "speechtrain.conf": ["*.yaml", "**/*.yaml"],
        "speechtrain.launchers": ["templates/*"],
    },
    entry_points={
        "console_scripts": [
            "speechtrain = speechtrain.commands.main:main",
            *(f"speechtrain-{name} = speechtrain.commands.{name}:main" for name in COMMANDS),
        ]
    },
)
