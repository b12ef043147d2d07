"""Generated code of the public contract, one package per version."""
