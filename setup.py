"""Package map: the top-level folders conf/ and launchers/ are installed inside the package."""

from pathlib import Path

from setuptools import find_packages, setup

version = next(
    line.split('"')[1]
    for line in Path("speechtrain/__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)

COMMANDS = ("train", "prepare", "evaluate", "transcribe", "export", "report", "doctor")

setup(
    name="speechtrain",
    version=version,
    description="Train speech models on whatever hardware a team owns, from one command",
    long_description=Path("README.md").read_text() if Path("README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11.1",  # 3.11.0's fork server lets other users in (CVE-2022-42919)
    packages=[
        *find_packages(include=["speechtrain", "speechtrain.*"]),
        "speechtrain.conf",
        "speechtrain.launchers",
    ],
    package_dir={"speechtrain.conf": "conf", "speechtrain.launchers": "launchers"},
    package_data={
        "speechtrain": ["py.typed", "data/corpora/digits_audio/*", "report/*.html"],
        "speechtrain.conf": ["*.yaml", "**/*.yaml"],
        "speechtrain.launchers": ["templates/*"],
    },
    install_requires=[
        "torch>=2.7",  # the oldest in a vendor's current images (docs/devices.md)
        "numpy",
        "hydra-core>=1.3.8",
        "omegaconf>=2.3",
        "pyyaml",
        "lhotse>=1.33",
        "urllib3",  # lhotse 1.33 imports it without declaring it
        "scipy",  # lhotse 1.33 resamples with it without declaring it
        "soundfile",
        "sentencepiece",
        "rapidfuzz",
        "safetensors",
        "psutil",
        "num2words",
        "rich",
        "tensorboard",
        "matplotlib",
        "jinja2",
    ],
    extras_require={
        # GPL-3 espeak-ng as a wheel: only to synthesise more words and voices, never at run time
        "demo": ["espeakng-loader"],
        "kenlm": ["kenlm"],  # decoder.lm from its binary files; compiled where there is no wheel
        "memory": ["bitsandbytes>=0.46"],  # optimizer=adamw8bit; the first with kernels for every device
        "interop": ["transformers>=4.57"],  # the other side of every conversion's proof
        "huggingface": ["datasets>=4"],  # corpus=huggingface; older ones run a program of the data set
        "notebook": ["jupyterlab"],  # of the image
        "ipex": ["torch==2.8.*", "intel-extension-for-pytorch==2.8.*"],  # its last release is for torch 2.8
        "peers": ["torchaudio"],  # the oracle of losses in `make test-peers`
        "sweep": ["hydra-joblib-launcher", "hydra-submitit-launcher"],  # jobs of a sweep beside each other
        "wandb": ["wandb>=0.31"],  # the oldest that was tried: it looks for a key without a prompt
        "dev": [
            "bitsandbytes>=0.46",
            "transformers>=4.57",
            "datasets>=4",
            "jiwer",  # the oracle of error rates
            "hydra-joblib-launcher",
            "hydra-submitit-launcher",
            "kubernetes>=37",  # its models check the manifests
            "wandb>=0.31",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "types-psutil",
            "kaldi-native-fbank",
            "build",
            "setuptools",
            "wheel",
        ],
    },
    entry_points={
        "console_scripts": [
            "speechtrain = speechtrain.commands.main:main",
            *(f"speechtrain-{name} = speechtrain.commands.{name}:main" for name in COMMANDS),
        ]
    },
)
