"""Models of transformers, and training of small GPTs, with attention replaced."""
