"""Dumps: the folder between the tap and whoever draws from it, and whether what lies there is sound."""
