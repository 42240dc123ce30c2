"""An executable that a newer jaxlib runs as it is, because the build has tried that."""

load("//rules:providers.bzl", "AotExecutableInfo", "PythonEnvironmentInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE", "compiler_action")
load("//rules/private:launcher.bzl", "label_of")

def _call(ctx, output, results = None):
    """Calls an executable. results: of the jaxlib that compiled it; None: this one is that."""
    made = ctx.attr.executable[AotExecutableInfo]
    arguments = ctx.actions.args()
    arguments.add("--label=" + label_of(ctx.label if results else ctx.attr.executable.label))
    arguments.add("--executable", made.executable)
    arguments.add("--description", made.description)
    arguments.add("--output", output)
    if results:
        arguments.add("--results", results)
    compiler_action(
        ctx,
        mnemonic = "StagecCall",
        progress_message = "Calling %s" % ctx.label.name,
        command = "action call",
        arguments = arguments,
        inputs = depset([made.executable, made.description] + ([results] if results else [])),
        outputs = [output],
        worker = False,  # a signal of XLA's ends the process that it is in
        follows_cpu = not results,  # XLA's routines choose their code by it
        environment = ctx.attr.environment,
    )

def _aot_results_impl(ctx):
    results = ctx.actions.declare_file(ctx.label.name)
    _call(ctx, results)
    return [DefaultInfo(files = depset([results]))]

def _aot_crossing_impl(ctx):
    name = ctx.label.name
    made = ctx.attr.executable[AotExecutableInfo]
    description = ctx.actions.declare_file(name + ".json")
    _call(ctx, description, ctx.file.results)
    fields = {field: getattr(made, field) for field in dir(made) if field not in ("to_json", "to_proto")}
    fields.update(name = name, description = description)  # what compiled it stays the same
    return [
        DefaultInfo(files = depset([description])),
        AotExecutableInfo(**fields),
    ]

_EXECUTABLE = attr.label(doc = "The executable.", mandatory = True, providers = [AotExecutableInfo])
_ENVIRONMENT = {"providers": [PythonEnvironmentInfo], "cfg": "exec"}

# A rule of its own: a target's actions all have its `exec_properties`, and the two jaxlibs may run on other machines.
aot_results = rule(
    implementation = _aot_results_impl,
    doc = "Calls an executable with the jaxlib that compiled it, on random arrays. The file `<name>` has what it gives.",
    attrs = {
        "executable": _EXECUTABLE,
        "environment": attr.label(doc = "The Python environment that compiled it; none for the toolchain's.", **_ENVIRONMENT),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)

aot_crossing = rule(
    implementation = _aot_crossing_impl,
    doc = "Calls an executable with a newer jaxlib, on the arrays of `aot_results`. If the results are equal within the " +
          "tolerances of the dtypes, `<name>.json` describes the executable for the newer one. `aot_manifest` declares one " +
          "for each executable for CPUs and each release in `runs_on`.",
    attrs = {
        "executable": _EXECUTABLE,
        "results": attr.label(doc = "Its `aot_results`.", mandatory = True, allow_single_file = True),
        "environment": attr.label(doc = "The one with the newer jaxlib; none for the toolchain's.", **_ENVIRONMENT),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)
