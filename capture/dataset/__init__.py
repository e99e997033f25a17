"""The dataset: the output folder, what it holds, in which formats, and whether it is whole."""
