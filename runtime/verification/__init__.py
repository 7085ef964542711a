"""Proves on the default device that generated files are bit-equal to mlx-lm: random models, walks and comparisons."""
