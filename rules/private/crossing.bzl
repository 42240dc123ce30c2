"""An executable that a newer jaxlib runs as it is, because the build has tried that."""

load("//rules:providers.bzl", "AotExecutableInfo", "PythonEnvironmentInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE", "compiler_action")
load("//rules/private:launcher.bzl", "label_of")

def _aot_crossing_impl(ctx):
    name = ctx.label.name
    made = ctx.attr.executable[AotExecutableInfo]
    results = ctx.actions.declare_file(name + ".results")
    description = ctx.actions.declare_file(name + ".json")
    for environment, more, output in [(ctx.attr.writer, None, results), (ctx.attr.environment, results, description)]:
        arguments = ctx.actions.args()
        arguments.add("--label=" + label_of(ctx.label))
        arguments.add("--executable", made.executable)
        arguments.add("--description", made.description)
        arguments.add("--output", output)
        if more:
            arguments.add("--results", more)
        compiler_action(
            ctx,
            mnemonic = "StagecCall",
            progress_message = "Calling %s" % name,
            command = "action call",
            arguments = arguments,
            inputs = depset([made.executable, made.description] + ([more] if more else [])),
            outputs = [output],
            worker = False,  # a signal of XLA's ends the process that it is in
            follows_cpu = more == None,  # XLA's routines choose their code by it
            environment = environment,
        )
    fields = {field: getattr(made, field) for field in dir(made) if field not in ("to_json", "to_proto")}
    fields.update(name = name, description = description)  # what compiled it stays the same
    return [
        DefaultInfo(files = depset([description])),
        AotExecutableInfo(**fields),
    ]

_ENVIRONMENT = {"providers": [PythonEnvironmentInfo], "cfg": "exec"}

aot_crossing = rule(
    implementation = _aot_crossing_impl,
    doc = "Calls an executable with the jaxlib that compiled it, and with a newer one, on the same random arrays. If the results " +
          "are equal within the tolerances of the dtypes, `<name>.json` describes the executable for the newer one. " +
          "`aot_manifest` declares one for each executable for CPUs and each release in `runs_on`.",
    attrs = {
        "executable": attr.label(doc = "The executable.", mandatory = True, providers = [AotExecutableInfo]),
        "writer": attr.label(doc = "The Python environment that compiled it; none for the toolchain's.", **_ENVIRONMENT),
        "environment": attr.label(doc = "The one with the newer jaxlib; none for the toolchain's.", **_ENVIRONMENT),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)
