"""A program that tells how an artifact and the current inputs differ."""

load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE")
load("//rules/private:current_inputs.bzl", "CURRENT_INPUTS", "current_inputs_program")

def _aot_explanation_impl(ctx):
    return current_inputs_program(ctx, "{stagec} explain {plugins} \"$@\" {inputs}")

aot_explanation = rule(
    implementation = _aot_explanation_impl,
    doc = "`bazel run <manifest>.explain -- OLD` tells how what an artifact was made from and what would be built now " +
          "differ. It traces what has changed, and compiles nothing. The macro of a manifest declares it.",
    executable = True,
    attrs = CURRENT_INPUTS,
    toolchains = [str(TOOLCHAIN_TYPE)],
)
