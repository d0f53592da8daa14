"""Parts for speechtrain in a package of one's own."""
