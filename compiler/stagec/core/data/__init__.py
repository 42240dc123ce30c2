"""Data of others, read strictly, and files, written whole. On the standard library alone."""
