"""The bundle of the server's tests."""

from compiler.extensions.serve.tests.conftest import bundle, models, served

__all__ = ["bundle", "models", "served"]
