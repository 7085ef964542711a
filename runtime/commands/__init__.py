"""The commands of `straightline`, one small module each. Importing one loads no MLX; running it may."""
