"""Frontends: from a user's function to a portable `Exported`. Only a frontend imports its framework."""
