"""`straightline bench`: what mlx-lm's model and straightline's do in the same process, cell by cell. Bits first."""
