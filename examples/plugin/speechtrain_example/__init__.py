"""Parts for speechtrain in a separate package."""
