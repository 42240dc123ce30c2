"""One exported function, compiled for one target."""

load("//rules:providers.bzl", "AotExecutableInfo", "AotExportInfo")
load("//rules:toolchain.bzl", "TOOLCHAIN_TYPE", "compiler_action")

def _aot_executable_impl(ctx):
    name = ctx.label.name
    exported = ctx.attr.export[AotExportInfo].exported
    spec = ctx.actions.declare_file(name + ".spec.json")
    executable = ctx.actions.declare_file(name + ".xla")
    description = ctx.actions.declare_file(name + ".json")
    ctx.actions.write(spec, ctx.attr.spec)

    arguments = ctx.actions.args()
    arguments.add("--spec", spec)
    arguments.add("--exported", exported)
    arguments.add("--output", executable)
    arguments.add("--description", description)
    compiler_action(
        ctx,
        mnemonic = "StagecCompile",
        progress_message = "Compiling %s" % name,
        command = "compile",
        arguments = arguments,
        inputs = depset([spec, exported]),
        outputs = [executable, description],
    )
    return [
        DefaultInfo(files = depset([executable, description])),
        AotExecutableInfo(
            name = name,
            export = ctx.attr.export[AotExportInfo].name,
            executable = executable,
            description = description,
            spec = spec,
        ),
    ]

aot_executable = rule(
    implementation = _aot_executable_impl,
    doc = "Compiles an exported function for one target: `<name>.xla`, described by `<name>.json`. The macro of a " +
          "manifest declares these.",
    attrs = {
        "spec": attr.string(doc = "The executable's slice of the plan, as canonical JSON.", mandatory = True),
        "export": attr.label(doc = "The exported function.", mandatory = True, providers = [AotExportInfo]),
    },
    toolchains = [str(TOOLCHAIN_TYPE)],
)
