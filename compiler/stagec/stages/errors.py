"""Errors of stages."""


class NotExported(ValueError):
    """The bytes are not a serialized `Exported` that this version can read."""


class CannotLower(ValueError):
    """An `Exported` cannot be lowered as asked; the message says what to change."""


class SizesDoNotFit(CannotLower):
    """The sizes of the dimensions break a constraint of the function; the message names both."""
