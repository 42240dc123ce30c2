"""A module that is imported by another name than its path."""

NAME = "library"
