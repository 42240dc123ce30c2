"""The version of stagec: of the wheel, the rules and the `versions` in descriptions."""

VERSION = "0.1.0"
