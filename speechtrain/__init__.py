"""speechtrain: train speech models on whatever hardware a team owns, from one command."""

__version__ = "0.1.0"
