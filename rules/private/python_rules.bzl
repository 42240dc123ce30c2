"""Which Python rules there are besides stagec's.

An aspect reads the attribute `imports`, which those of all rule sets have (python_library.bzl). To load their providers
would need their repositories. This target gives a provider that Bazel has built in, and a user can replace it.
"""

load("//rules:providers.bzl", "PythonRulesInfo")

# Bazel 8 and later have no Python rules. What they lack is not even loaded: an unknown name is an error.
BUILT_IN_PYTHON_RULES = (
    "//rules/private/built_in_python:python_rules" if hasattr(native, "py_library") else "//rules:no_python_rules"
)

def _python_rules_impl(_ctx):
    return [PythonRulesInfo(providers = [])]

python_rules = rule(
    implementation = _python_rules_impl,
    doc = "Says that no provider of another rule set is known.",
)
