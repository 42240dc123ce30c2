"""A program that says how an artifact and the current inputs differ."""

load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE")
load("//rules/private:current_inputs.bzl", "CURRENT_INPUTS", "current_inputs_program")

def _aot_explanation_impl(ctx):
    return current_inputs_program(ctx, "{stagec} explain {plugins} \"$@\" {inputs}")

aot_explanation = rule(
    implementation = _aot_explanation_impl,
    doc = "`bazel run <manifest>.explain -- OLD` compares an artifact with what Bazel would build now, and says what " +
          "differs. It traces functions that have changed, and compiles nothing. `aot_manifest` declares it.",
    executable = True,
    attrs = CURRENT_INPUTS,
    toolchains = [str(TOOLCHAIN_TYPE)],
)
