"""The rendered forwards, one file an architecture. Made by ./regen.sh; never edited."""
