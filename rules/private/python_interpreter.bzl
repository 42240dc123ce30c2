"""The interpreter of a Python toolchain, for stagec's actions."""

load("//rules:providers.bzl", "InterpreterInfo")

_PYTHON = "@bazel_tools//tools/python:toolchain_type"

def _python_interpreter_impl(ctx):
    runtime = ctx.toolchains[_PYTHON].py3_runtime
    if not runtime:
        fail("%s: the Python toolchain has no py3_runtime; register one whose py_runtime_pair has it" % ctx.label)
    files = runtime.files or depset()
    if runtime.interpreter:
        files = depset([runtime.interpreter], transitive = [files])
    return [
        DefaultInfo(files = files),
        InterpreterInfo(
            executable = runtime.interpreter or runtime.interpreter_path,
            files = files,
            version = ctx.attr.version,
            packages = None,
        ),
    ]

python_interpreter = rule(
    implementation = _python_interpreter_impl,
    doc = "The interpreter of the toolchain of type `@bazel_tools//tools/python:toolchain_type`: a `py_runtime`, of " +
          "whatever rule set. Name it in `interpreter` of your own `stagec_toolchain`, and actions run it.",
    attrs = {
        "version": attr.string(
            doc = "Its full version, such as 3.11.9. Actions compare it. Without it, it must be the version of the " +
                  "interpreter that installed the packages.",
        ),
    },
    toolchains = [_PYTHON],
)
