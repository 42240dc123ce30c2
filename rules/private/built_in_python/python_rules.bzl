"""The Python rules that Bazel 4 to 7 have built in."""

load("//rules:providers.bzl", "PythonRulesInfo")

def _python_rules_impl(_ctx):
    return [PythonRulesInfo(providers = [PyInfo])]

python_rules = rule(
    implementation = _python_rules_impl,
    doc = "Hands out the built-in PyInfo.",
)
